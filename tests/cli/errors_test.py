"""The tables of docs/errors.md that are of the command line: `errors_test.py CADRE`.

Runs every use in a folder with the files that the page names, and compares the answers with the
page; CADRE_WRITE_ERRORS=1 writes the page. Every message of the sources must be in a table.
"""
import os
import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import errors_page

import damaged_checkpoints

CADRE = os.path.abspath(sys.argv.pop(1))
TINY = "--window 3 --hidden 16 --features 16 --experts 4 --rows 32 --sample 0"
COUNTS = "offsets counts R=9 E=2"

WORDS = """
cadre inform
cadre --verbose
cadre info --yaml
cadre info formats
cadre explain
cadre explain offsets counts R=9 E=2 --device tpu
cadre explain offsets counts R=9 E=2 --device cuda:x
cadre explain offsets counts R=9 E=2 --device cuda:7
cadre check offsets counts R=9 E=2 --device sm_90
cadre check offsets counts R=9 E=2 --device cuda:7
cadre facts --device cpu
cadre info > /dev/full
(ulimit -v 400000; cadre check grouped_gemm fprop R=9 N=8192 K=8192 E=8)
"""

PROBLEMS = """
cadre explain gemm R=9
cadre explain offsets counts R=9 E=2 --only cpu
cadre explain ''
cadre explain offsets
cadre explain offsets sums R=9 E=2
cadre explain offsets counts counts R=9 E=2
cadre explain offsets counts R=9 R=9
cadre explain offsets counts R=many
cadre explain offsets counts R=-9
cadre explain offsets counts E=4294967296
cadre explain offsets counts E=0
cadre explain offsets counts R=9 E=2147483647
cadre explain offsets counts R=2147483648 E=2
cadre explain offsets counts S=9
cadre explain offsets counts R=9 E=2 index=bf16
cadre explain offsets counts R=9 E=2 index=i31
cadre explain grouped_gemm fprop R=9 N=4611686018427387904 K=16 E=2
cadre explain grouped_gemm fprop R=9 N=0 K=16 E=2
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 align=3
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 format=fp9
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 format=bf16:2d
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 format=mxfp8:3d
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 x=bf16:2d w=bf16
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 x=mxfp8:3d w=bf16
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 x=mxfp8:2d+2d w=bf16
cadre explain activation forward swish R=9 F=4 E=2
cadre explain activation forward clamped_swiglu R=9 F=4 E=2 limit=inf
cadre explain activation forward clamped_swiglu R=9 F=4 E=2 limit=x
cadre explain activation forward relu R=9 F=4 E=2 z=i32
cadre explain permute permute T=9 top_k=2 R=18 H=0 E=4
cadre explain permute combine H=1 ranks=32768
cadre explain permute combine_backward H=1 ranks=2 prob=yes
cadre explain permute permute H=1 addend=yes
cadre explain bias_grad R=9 N=0 E=2
cadre explain routing T=9 E=4 top_k=5
cadre explain routing forward many T=9 E=4 top_k=5
cadre explain permute sideways T=9 top_k=2 R=18 H=4 E=2
cadre explain quantize rows R=9 C=-1 E=2 along_k=mxfp8
cadre explain dequantize rows R=9 C=16 E=2 x=bf16
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=fp9
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=bf16,top=f32
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=fprop=bf16
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=bf16,wgrad=f32,wgrad=f32
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=bf16,pinned,pinned
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=nvfp4,fprop=nvfp4:rht*nvfp4:rht
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=nvfp4,wgrad=nvfp4:rht*nvfp4
cadre explain grouped_linear R=9 N=8 K=16 E=2 bias_scale=yes
cadre explain grouped_mlp R=9 H=0 F=8 E=2
cadre explain sequential R=9
"""

FIELDS = """
cadre explain activation forward silu R=9 F=4 E=2 limit=6
cadre explain activation forward clamped_swiglu R=9 F=4 E=2 limit=0
cadre explain activation forward silu R=9 F=4 E=2 layout=interleave32
cadre explain activation forward swiglu R=9 F=4 E=2 layout=interleave32
cadre explain activation forward swiglu R=9 F=4 E=2 along_k=nvfp4
cadre explain activation forward swiglu R=9 F=4 E=2 along_k=mxfp8 amax_eps=-1
cadre explain activation forward swiglu R=9 F=4 E=2 along_k_scales_major=column
cadre explain activation forward swiglu R=9 F=4 E=2 amax_eps=0.5
cadre explain activation forward swiglu R=9 F=4 E=2 plain=yes
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 format=bf16 x=bf16
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 discrete_bias=yes
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 bias_scale=yes
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 accumulate=yes
cadre explain grouped_gemm wgrad R=9 N=8 K=16 E=2 tail=zero
cadre explain grouped_gemm wgrad R=9 N=8 K=16 E=2 bias=yes
cadre explain grouped_gemm wgrad R=9 N=8 K=16 E=2 dy=nvfp4:rht x=nvfp4
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 T=4
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 top_k=2
cadre explain grouped_gemm dgrad R=9 N=8 K=16 E=2 gather=rhs T=4
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 gather=lhs
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 gather=lhs T=4 format=mxfp8
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 gather=lhs T=4 lhs_major=column
cadre explain grouped_gemm wgrad R=9 N=8 K=16 E=2 scatter=yes T=4
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 ranks=2
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 scatter=yes T=4 gather=lhs
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 scatter=yes T=4 act=relu
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 scatter=yes T=4 beta=yes
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 scatter=yes T=4 tail=zero
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 scatter=yes T=4 out_major=column
cadre explain grouped_gemm fprop R=9 N=8 K=16 E=2 scatter=yes T=4 ranks=32768
cadre explain grouped_linear R=9 N=8 K=16 E=2 scatter_dx=yes gather=yes T=4
cadre explain grouped_linear R=9 N=8 K=16 E=2 ranks=2
cadre explain sequential '|' grouped_linear R=9 N=8 K=8 scatter=yes T=4
cadre explain offsets counts R=9 E=2 T=4
cadre explain permute permute T=9 top_k=2 R=18 H=4 E=2 dtype=i32
cadre explain permute combine T=9 R=9 H=64 E=2 format=mxfp8
cadre explain permute permute T=9 R=9 H=64 E=2 format=nvfp4
cadre explain permute permute T=9 R=9 H=96 E=2 format=mxfp8
cadre explain permute permute T=9 R=9 H=64 E=2 scales_major=column
cadre explain permute permute T=9 R=9 H=64 E=2 format=mxfp8 scales_major=column
cadre explain quantize rows R=9 C=16 E=2
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 along_rows_codes_major=column
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 along_rows_decoded=yes
cadre explain quantize rows R=9 C=16 E=2 along_k=bf16 along_k_decoded=yes
cadre explain quantize rows R=9 C=9 along_k=mxfp8 along_k_decoded=yes along_k_scales_major=column
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 amax_eps=-1
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 amax_eps=1
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 discrete=yes
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 T=5
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 top_k=2
cadre explain quantize weights N=9 K=16 E=2 along_k=mxfp8 gather=yes T=5
cadre explain quantize rows R=9 C=16 E=2 along_k=mxfp8 gather=yes T=1073741824 top_k=2
cadre explain dequantize rows R=9 C=16 E=2 format=mxfp8 codes_major=column
cadre explain routing forward softmax T=9 E=4 top_k=5
cadre explain routing forward softmax T=9 E=4 top_k=2 groups=3
cadre explain routing forward softmax T=9 E=4 top_k=2 groups=2 group_top_k=3
cadre explain routing backward softmax T=9 E=4 top_k=2 map=yes
cadre explain routing forward softmax T=9 E=4 top_k=2 row_prob=yes
cadre explain routing forward softmax T=9 E=4 top_k=3 groups=4 group_top_k=2
cadre explain grouped_linear R=9 N=8 K=16 E=2 return_bias=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 bias=yes bias_scale=yes return_bias=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 bias=yes return_bias=yes act=relu
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=mxfp8 weight_major=column
cadre explain grouped_linear R=9 N=8 K=16 E=2 quantized_x=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=mxfp8 quantized_x=yes save_input=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=nvfp4,wgrad=nvfp4*nvfp4:sr save_input=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=mxfp4 quantized_w=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 quantized_w=yes dgrad=no wgrad=no
cadre explain grouped_linear R=9 recipe=mxfp4 quantized_w=yes dgrad=no wgrad=no cache_weights=yes
cadre explain grouped_linear R=9 recipe=mxfp4 quantized_w=yes dgrad=no wgrad=no discrete_weight=yes
cadre explain moe T=-1 top_k=2 H=8 F=16 E=4
cadre explain moe T=1073741824 top_k=2 H=8 F=16 E=4
cadre explain moe T=9 top_k=5 H=8 F=16 E=4
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 quantized_x=yes
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 bias2=yes dbias=no
cadre explain grouped_linear R=9 N=8 K=16 E=2 gather=yes T=4 recipe=mxfp8 quantized_x=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 given_x_along_k=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 recipe=mxfp8 quantized_x=yes given_x_along_k=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 given_dy_along_k=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 T=4
cadre explain grouped_linear R=9 N=8 K=16 E=2 gather_dw=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 gather_dy=yes T=4 bias=yes
cadre explain grouped_linear R=9 N=8 K=16 E=2 gather=yes gather_dw=yes gather_dy=yes T=4
cadre explain grouped_mlp R=9 H=8 F=16 E=2 gather_dy=yes T=4 recipe=mxfp8
cadre explain grouped_mlp R=9 H=8 F=16 E=2 gather=yes gather_dw=yes T=4 recipe=mxfp8
cadre explain grouped_mlp R=9 H=8 F=16 E=2 top_k=4
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 shared_F=-1
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 shared_gate=yes
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 index=i64
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 routed=yes index=f32
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 routed=yes normalize=yes
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 routed=yes shared_F=8
cadre explain grouped_mlp R=9 H=8 F=16 E=2 bias2_scale=yes
cadre explain grouped_mlp R=9 H=8 F=16 E=2 recipe=nvfp4,wgrad=nvfp4*nvfp4:sr
cadre explain moe T=9 top_k=2 H=8 F=16 E=4 recipe=nvfp4,wgrad=nvfp4*nvfp4:sr
cadre explain sequential
cadre explain sequential '|' permute permute T=9 top_k=2 R=18 H=4 E=2
cadre explain sequential '|' activation forward relu R=9 F=8 '|' activation forward relu R=8 F=8
cadre explain sequential '|' activation forward relu R=9 F=8 '|' activation forward relu R=9 F=8 E=2
cadre explain sequential '|' activation forward relu R=9 F=8 '|' activation forward relu R=9 F=9
cadre explain sequential '|' activation forward relu F=8 '|' activation forward relu F=8 z=f32
cadre explain sequential '|' grouped_linear R=9 N=8 K=8 '|' grouped_linear R=9 N=8 K=8 dgrad=no
cadre explain sequential '|' grouped_linear R=9 N=8 K=8 recipe=mxfp8 quantized_x=yes
cadre explain sequential '|' grouped_linear R=9 N=8 K=8 recipe=mxfp8 given_x_along_k=yes
cadre explain sequential '|' grouped_linear R=9 N=8 K=8 recipe=mxfp8 given_dy_along_k=yes
cadre explain sequential '|' grouped_linear R=9 N=8 K=8 act=relu
cadre explain sequential '|' grouped_linear R=9 N=8 K=8 gather=yes T=4
cadre explain sequential '|' activation forward relu R=9 F=8 along_k=mxfp8
"""

CHECK = """
cadre check offsets counts R=9 E=2 --file shapes
cadre check --file nowhere
cadre check --file empty
cadre check --file comment
cadre check --file pipe
cadre check --file /dev/zero
cadre check --file folder
cadre check --file large
cadre check --file zeros
cadre check --file wrong_line
cadre check offsets counts R=9 E=2 --seed -1
cadre check offsets counts R=9 E=2 --seed 4294967296
cadre check offsets counts R=9 E=2 --random -1
cadre check offsets counts R=9 E=2 --only gpu
cadre check grouped_linear R=9 N=8 K=16 E=2 --only cpu_onednn
cadre check grouped_gemm fprop R=9 N=8 K=16 E=2 format=mxfp8 --only cpu_scattered
cadre check expert_parallel T=1 H=1 R=1 --only tree
cadre check expert_parallel T=1 H=64 R=1 x=mxfp8 --only collective
cadre check expert_parallel T=1 H=1 R=1 block=1
cadre check expert_parallel T=1 H=1 R=1 cross=choice
cadre check expert_parallel T=1 H=1 block=1 cross=token --only collective
cadre check expert_parallel T=1 H=1 block=1 cross=host --only collective
cadre check expert_parallel T=1 H=1 ranks=2 cross=host --only collective
cadre check expert_parallel T=1 H=1 ranks=2 host_ranks=2 --only collective
cadre check expert_parallel T=1 H=1 cross=both
cadre check offsets counts R=9 E=2 --offsets lumpy
cadre check offsets counts R=9 E=2 --offsets zipf:x
cadre check offsets counts R=9 E=2 --offsets gamma:0
cadre check offsets counts R=9 E=2 --offsets pipe
cadre check offsets counts R=9 E=2 --offsets text
cadre check offsets counts R=9 E=2 --offsets zeros
cadre check offsets counts R=9 E=2 --offsets three_counts
cadre check moe T=9 top_k=1 H=8 F=16 E=2 --offsets no_rows
cadre check offsets counts R=9 E=2 --offsets large_counts
cadre check offsets counts R=9 E=2 --offsets huge_counts
cadre check bias_grad R=1 N=2199023255552 E=4 --limit 0
cadre check grouped_gemm fprop R=8000000 N=16384 K=8192 E=4
cadre check --random 1000000
cadre bench grouped_gemm fprop R=8000000 N=16384 K=8192 E=4
cadre bench grouped_linear R=8000000 N=16384 K=8192 E=4 --host-time
cadre check offsets counts R=9 E=2 --limit 1.5
cadre bench
cadre bench offsets counts R=9 E=2 --file shapes
cadre bench grouped_linear R=9 N=8 K=16 E=2 --only direct
cadre bench grouped_linear R=9 N=8 K=16 E=2 --beside recipe=bf17
cadre bench expert_parallel T=1 H=1 R=1 --beside R=2
cadre bench expert_parallel T=8 top_k=2 H=4 E=2 ranks=1 R=8
cadre bench 'sequential | activation forward relu R=9 F=8 E=2' --host-time
cadre bench grouped_linear R=9 N=8 K=16 E=2 --host-time --only cpu_reference
cadre bench grouped_linear R=9 N=8 K=16 E=2 --host-time --offsets uniform,onehot
cadre check offsets counts R=9 E=2 --limit 0x10
cadre bench offsets counts R=9 E=2 --repeat 0
cadre bench offsets counts R=9 E=2 --threads 5000
cadre bench offsets counts R=9 E=2 --json folder
cadre bench offsets counts R=9 E=2 --repeat 1 --json /dev/full
cadre bench offsets counts R=9 E=2 --beside R=8
"""

TRAIN = """
cadre train
cadre train nowhere
cadre train empty
cadre train zeros
cadre train pipe
cadre train short
cadre train scraps
cadre train text --held-out 0
cadre train text --steps 0
cadre train text --steps 1e3
cadre train text --lr nan
cadre train text --lr 2
cadre train text --seed -1
cadre train text --seed 9007199254740993
cadre train text --lr 1 --warmup 0 --weight-decay 10 --balance 10 --seed 3 TINY
cadre train text --hidden 24
cadre train text --features 24
cadre train text --experts 2 --top-k 3
cadre train text --hidden 8192 --features 32768 --experts 1024
cadre train text --recipe fp9
cadre train text --recipe bf16,bf16
cadre train text --save-every 0
cadre train text --steps 1 --verify-resume
cadre train text --sample -1
cadre train text --temperature nan
cadre train text --temperature 101
cadre train text --device tpu
cadre train text --out ''
cadre train text --out text
(ulimit -f 10; cadre train text --out other --steps 1 TINY)
cadre train text --out run TINY
cadre train text --recipe f32 --out run TINY
cadre train text --out mine TINY --overwrite
cadre train text --out half TINY
cadre train text --out busy TINY
cadre train --resume ''
cadre train --resume nowhere
cadre train --resume folder
cadre train --resume pipe
cadre train --resume text
cadre train --resume empty
cadre train --resume copy.safetensors
cadre train --resume run --verify-resume
cadre train --resume half --steps 7
cadre train --resume half --recipe mxfp8
cadre train --resume half --out other
cadre train short text --resume half
"""

DAMAGED = "\n".join(f"cadre train --resume bad/{name}.safetensors" for name in """
one_bit cut_short list tensor_twice foreign no_shape unknown_dtype other_length beyond_the_end gap
bytes_of_nobody metadata_is_a_list metadata_is_a_number no_step step_x step_too_large paths_no_list
other_recipe one_word_more paths_with_a_space no_lr more_settings setting_x setting_without_value
other_shape one_tensor_more other_history no_tensors""".split())

SECTIONS = {"cli_words": WORDS, "cli_problems": PROBLEMS, "cli_fields": FIELDS, "cli_check": CHECK,
            "cli_train": TRAIN, "cli_checkpoints": DAMAGED}

# Of the machine or the build: what each pattern finds becomes "...".
DEPENDS = [r"(?<=is not here; ).*", r"(?<=an unfinished run, step )\d+(?= of)",
           r"(?<=would take about )\d+", r"(?<=the problem need )\d+ MB, must be at most \d+"]

# Whose messages must be in a table.
SOURCES = ["cli/*.cpp", "bench/*.cpp", "apps/train/*.cpp", "src/ops/problem_text.cpp",
           "src/ops/recipe.cpp", "src/ops/format.cpp", "src/ops/device.cpp",
           "src/ops/activation.cpp", "src/ops/bias_grad.cpp", "src/ops/offsets.cpp",
           "src/ops/permute.cpp", "src/ops/quantize.cpp", "src/ops/routing.cpp",
           "src/layers/*_plan.cpp", "src/layers/sequential_problem.cpp"]
# Messages that no use above provokes: a part of each, and why.
ELSEWHERE = {
    "load: dtype is ": "a fault of cadre",
    "store: dtype is ": "a fault of cadre",
    "format: element of ": "a caller in C++",
    "format: kind is ": "a caller in C++",
    "activation: kind is ": "a caller in C++",
    "every product takes its operands as they are quantised": "a caller in C++ that names a route",
    "it takes no product that others do not take": "a caller in C++ that names a route",
    "it does not take the product": "a caller in C++ that names a route",
    "quantiles: there are no samples, must be 1 or more": "a fault of cadre",
    " MB, must be less; name fewer files": "2 GB of text",
    "; check its permissions": "not refused to root",
    "; check the path and its permissions": "not refused to root",
    " cannot be read: ": "not refused to root",
    "; check the file and its disk": "a broken disk",
    " MB for a checkpoint; free space there or choose another folder with --out": "a full disk",
    "; give --device cpu, or another recipe: ": "a GPU",
    "facts: ranks is 2, must be 1; this machine has ": "one GPU: facts_command_test.py",
}


def fill(folder):
    """The files that the page names."""
    prose = "".join(f"the rows of expert {i % 97} are few\n" for i in range(200))
    for name, content in {
            "text": prose, "short": prose[:1000], "empty": "", "zeros": "\0" * 4096,
            "shapes": COUNTS + "\n", "comment": "# nothing\n",
            "wrong_line": f"# one\n{COUNTS}\noffsets counts R=x E=2\n", "three_counts": "1 2 3",
            "no_rows": "0 0",
            "large_counts": "9 9", "huge_counts": f"{2**31} 0"}.items():
        (folder / name).write_text(content)
    with open(folder / "large", "wb") as file:
        file.truncate(2**27)
    os.mkfifo(folder / "pipe")
    (folder / "folder").mkdir()
    (folder / "scraps").mkdir()
    for i in range(300):
        (folder / "scraps" / str(i)).write_text(prose[:9])
    (folder / "mine").mkdir()
    (folder / "mine/report.html").write_text("<!doctype html>\n<title>sales</title>\n")


def train_runs(folder):
    """The runs that the page names, and what somebody may have done to their files."""
    words = ["train", "text", *TINY.split()]
    subprocess.run([CADRE, *words, "--out", "run", "--steps", "2"], **options(folder))
    steps = ["--steps", "1000000", "--save-every", "1"]
    for name in "half", "busy":
        run = subprocess.Popen([CADRE, *words, "--out", name, *steps], cwd=folder,
                               stdout=subprocess.DEVNULL)
        while not (folder / name / "bf16.safetensors").exists():
            pass
        if name == "half":
            run.kill()
            run.wait()
    shutil.copy(folder / "run/bf16.safetensors", folder / "copy.safetensors")
    (folder / "bad").mkdir()
    for name, content in damaged_checkpoints.files(
            (folder / "run/bf16.safetensors").read_bytes()).items():
        (folder / "bad" / name).write_bytes(content)
    return run


def options(folder):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive",
           "CUDA_VISIBLE_DEVICES": ""}  # no GPU, wherever it runs
    return {"cwd": folder, "env": env, "text": True, "capture_output": True}


def messages(source):
    """The longest literal of every call that throws."""
    calls = r"\b(?:require|demand|holds|fail|UsageError|InvalidArgument|Unsupported)\("
    for call in re.finditer(calls, source):
        end, depth = call.end(), 1
        while depth > 0:
            depth += {"(": 1, ")": -1}.get(source[end], 0)
            end += 1
        literals = re.findall(r'(?:"(?:[^"\\]|\\.)*"\s*)+', source[call.end():end])
        words = ["".join(re.findall(r'"((?:[^"\\]|\\.)*)"', each)) for each in literals]
        if words:
            yield max(words, key=len)


class Errors(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = pathlib.Path(tempfile.mkdtemp(prefix="cadre_errors_"))
        cls.addClassCleanup(shutil.rmtree, cls.folder)
        fill(cls.folder)
        shutil.copy(CADRE, cls.folder / "bin")  # as where it is installed, away from the sources
        busy = train_runs(cls.folder)
        cls.addClassCleanup(busy.wait)
        cls.addClassCleanup(busy.kill)

    def answer(self, use):
        command = use.replace("cadre", shlex.quote(str(self.folder / "bin")), 1)
        done = subprocess.run(command.replace("TINY", TINY), shell=True, **options(self.folder))
        legal = re.match(r"cadre: (no implementation on|\w+: no route takes it on) ", done.stderr)
        self.assertEqual(done.returncode, 1 if legal else 2, (use, done.stderr))
        self.assertRegex(done.stderr, r"^cadre: [^\n]+\n$", use)
        text = done.stderr.removeprefix("cadre: ").strip()
        for pattern in DEPENDS:
            text = re.sub(pattern, "...", text)
        return text

    def test_the_page_says_what_the_program_says(self):
        for name, uses in SECTIONS.items():
            with self.subTest(name):
                rows = [(use, self.answer(use)) for use in uses.strip().splitlines()]
                errors_page.settle(name, rows)

    def test_the_tables_have_every_message_of_the_sources(self):
        page = errors_page.PAGE.read_text()
        absent = {words: path.name for pattern in SOURCES for path in ROOT.glob(pattern)
                  for words in messages(path.read_text()) if words.strip() not in page}
        self.assertEqual(absent.keys(), ELSEWHERE.keys(), absent)


if __name__ == "__main__":
    unittest.main()
