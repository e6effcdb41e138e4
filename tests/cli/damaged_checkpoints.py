"""Checkpoints that no program writes: each has one thing wrong, and is whole otherwise."""
import json

MASK = 2**64 - 1


def split(bytes):
    """(header, data) of a safetensors file."""
    end = 8 + int.from_bytes(bytes[:8], "little")
    return json.loads(bytes[8:end]), bytes[end:]


def joined(header, data):
    words = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(words).to_bytes(8, "little") + words + data


def scatter(word):
    word = (word + 0x9E3779B97F4A7C15) & MASK
    word = (word ^ word >> 30) * 0xBF58476D1CE4E5B9 & MASK
    word = (word ^ word >> 27) * 0x94D049BB133111EB & MASK
    return word ^ word >> 31


def tensors_checksum(header, data):
    """The checksum of the first kind of checkpoints, which leaves their metadata out."""
    total = 0
    for name in sorted(set(header) - {"__metadata__"}):
        begin, end = header[name]["data_offsets"]
        words = end - (end - begin) % 8
        for at in range(begin, words, 8):
            word = int.from_bytes(data[at:at + 8], "little")
            total = ((total ^ word) * 0x100000001B3 + (total >> 47)) & MASK
        for byte in data[words:end]:
            total = (total ^ byte) * 0x100000001B3 & MASK
        total = scatter(total)
    return f"{total:x}"


def changed(good, change):
    """A checkpoint of the first kind after `change(header, metadata)`, with its checksum right."""
    header, data = split(good)
    metadata = header["__metadata__"]
    change(header, metadata)
    metadata["kind"] = "cadre train 1"
    metadata["checksum"] = tensors_checksum(header, data)
    return joined(header, data)


def word(name, value):
    """Changes a word of the metadata."""
    return lambda header, metadata: metadata.update({name: value})


def setting(old, new):
    def change(header, metadata):
        assert old in metadata["settings"]
        metadata["settings"] = metadata["settings"].replace(old, new)
    return change


def without(name):
    return lambda header, metadata: metadata.pop(name)


def one_tensor_more(header, metadata):
    header["more"] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def a_look_without_its_step(header, metadata):
    """The bytes of the steps at which it looked become one more of its looks."""
    bits, step = header["history.eval_bits"], header["history.eval_step"]
    end = step["data_offsets"][1]
    bits.update(shape=[bits["shape"][0] + step["shape"][0]],
                data_offsets=[bits["data_offsets"][0], end])
    step.update(shape=[0], data_offsets=[end, end])


def files(good):
    """{name: bytes}, made from a good checkpoint."""
    last = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    one = lambda **more: joined({"x": {**last, **more}}, bytes(4))
    twice = b'{"x":%s,"x":%s}' % ((json.dumps(last).encode(),) * 2)
    made = {
        "one_bit": good[:-1] + bytes([good[-1] ^ 1]), "cut_short": good[:-1],
        "list": joined([], b""), "tensor_twice": joined(twice, bytes(4)),
        "foreign": one(), "no_shape": joined({"x": {"dtype": "F32"}}, b""),
        "unknown_dtype": one(dtype="F31"), "other_length": one(shape=[2]),
        "beyond_the_end": one(data_offsets=[0, 8]), "gap": joined({"x": {
            **last, "data_offsets": [4, 8]}}, bytes(8)),
        "bytes_of_nobody": joined({"x": last}, bytes(5)),
        "metadata_is_a_list": joined({"__metadata__": []}, b""),
        "metadata_is_a_number": joined({"__metadata__": {"step": 1}}, b""),
        "no_step": changed(good, without("step")), "step_x": changed(good, word("step", "x")),
        "step_too_large": changed(good, word("step", "3")),
        "paths_no_list": changed(good, word("paths", "1")),
        "other_recipe": changed(good, word("recipe", "f32")),
        "one_word_more": changed(good, word("note", "mine")),
        "paths_with_a_space": changed(good, word("paths", "[ ]")),
        "no_lr": changed(good, setting("lr=", "rl=")),
        "more_settings": changed(good, setting("lr=", "more=1 lr=")),
        "setting_x": changed(good, setting("rows=", "rows=x")),
        "setting_without_value": changed(good, setting("rows=", "rows")),
        "other_shape": changed(good, setting("window=3", "window=4")),
        "one_tensor_more": changed(good, one_tensor_more),
        "other_history": changed(good, a_look_without_its_step),
        "no_tensors": joined({"__metadata__": {**split(good)[0]["__metadata__"],
                                               "kind": "cadre train 1", "checksum": "0"}}, b""),
    }
    return {f"{name}.safetensors": content for name, content in made.items()}
