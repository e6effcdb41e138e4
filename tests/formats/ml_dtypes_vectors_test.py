"""Conversions by the Python package ml_dtypes, an implementation that none of us wrote.

Without arguments: makes the vectors anew and compares them with ml_dtypes_vectors.txt beside this
file, which ml_dtypes_test.cpp holds our formats against. With --write: writes that file.

Encoding is recorded up to the largest value of a format. What lies beyond, and NaN, is decided by
our own rule (saturation; one code of NaN), which small_float_test.cpp tests: ml_dtypes turns what
is beyond e4m3's largest value into NaN, and beyond e5m2's into infinity. e8m0 is recorded at the
powers of two alone: ml_dtypes rounds to the nearest there, and our scales up or down.
"""
import pathlib
import random
import sys

import ml_dtypes
import numpy as np

FILE = pathlib.Path(__file__).with_name("ml_dtypes_vectors.txt")
FORMATS = {  # our name: their type, code of the largest value, random inputs
    "e4m3": (ml_dtypes.float8_e4m3fn, 0x7E, 150),
    "e5m2": (ml_dtypes.float8_e5m2, 0x7B, 150),
    "e2m1": (ml_dtypes.float4_e2m1fn, 0x7, 60),
    "bf16": (ml_dtypes.bfloat16, 0x7F7F, 150),
    "f16": (np.float16, 0x7BFF, 150),
}


def code_type(dtype):
    return np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16


def decode(dtype, codes):
    return np.array(codes, dtype=code_type(dtype)).view(dtype).astype(np.float32)


def encode(dtype, values):
    return np.asarray(values, dtype=np.float32).astype(dtype).view(code_type(dtype))


def bits(values):
    return np.asarray(values, dtype=np.float32).view(np.uint32)


def inputs(dtype, largest, count, rng):
    """Positive values and midpoints of neighbours with the floats beside them, and random ones."""
    codes = range(largest + 1) if largest < 256 else rng.sample(range(largest), 60) + [largest]
    values = decode(dtype, sorted(codes)).astype(np.float64)
    middles = (values[:-1] + values[1:]) / 2
    exact = np.concatenate([values, middles]).astype(np.float32)
    beside = [np.nextafter(exact, np.float32(np.inf)), np.nextafter(exact, np.float32(0))]
    span = float(values[-1])
    scaled = [rng.choice((-1, 1)) * span * 2 ** -rng.uniform(0, 24) for _ in range(count)]
    every = np.unique(bits(np.concatenate([exact, *beside, np.array(scaled, np.float32)])))
    return [x for x in every.view(np.float32) if abs(x) <= span]


def lines():
    rng = random.Random(2024)
    yield "# Written by ml_dtypes_vectors_test.py --write. decode: code, fp32 bits or nan."
    yield "# encode: fp32 bits, code."
    for name, (dtype, largest, count) in FORMATS.items():
        if largest < 256:
            end = 16 if name == "e2m1" else 256
            values = decode(dtype, list(range(end)))
            for code, (value, raw) in enumerate(zip(values, bits(values))):
                yield f"decode {name} {code:x} {'nan' if np.isnan(value) else f'{raw:x}'}"
        chosen = inputs(dtype, largest, count, rng)
        for raw, code in zip(bits(chosen), encode(dtype, chosen)):
            yield f"encode {name} {raw:x} {code:x}"
    scales = decode(ml_dtypes.float8_e8m0fnu, list(range(256)))
    for code, (value, raw) in enumerate(zip(scales, bits(scales))):
        yield f"decode e8m0 {code:x} {'nan' if np.isnan(value) else f'{raw:x}'}"
    for raw, code in zip(bits(scales[:255]), encode(ml_dtypes.float8_e8m0fnu, scales[:255])):
        yield f"encode e8m0 {raw:x} {code:x}"


def main(arguments):
    made = list(lines())
    if arguments == ["--write"]:
        FILE.write_text("\n".join(made) + "\n")
        return 0
    recorded = FILE.read_text().splitlines()
    if made == recorded:
        print(f"{len(made)} vectors are as recorded")
        return 0
    wrong = [(a, b) for a, b in zip(made, recorded) if a != b]
    print(f"{len(wrong)} of {len(made)} lines differ, {len(recorded)} were recorded")
    for a, b in wrong[:5]:
        print(f"  made '{a}', recorded '{b}'")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
