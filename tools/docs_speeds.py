"""The table of tools/docs.py that says in a few lines how Cadre compares with others."""
import math

from docs_table import markdown, records

# What is compared, the topic of its record, its calls or passes, its peer there, and its page.
_GEMM, _MOE, _MODELS = "ops/grouped_gemm", "layers/moe", "torch"
_BOTH = ("fprop", "dgrad")
ROWS = [
    ("grouped GEMM, bf16, fprop and dgrad", "grouped-gemm-torch", _BOTH, "torch", _GEMM),
    ("grouped GEMM, bf16, fprop and dgrad", "grouped-gemm-torch", _BOTH, "deepgemm", _GEMM),
    ("grouped GEMM, bf16, wgrad", "grouped-gemm-torch", ("wgrad",), "torch", _GEMM),
    ("grouped GEMM, fp8_tensor", "grouped-gemm-fp8-tensor-torch", _BOTH, "torch", _GEMM),
    ("MoE layer, bf16, forward", "moe-torch", ("forward",), "torch", _MOE),
    ("MoE layer, bf16, forward", "moe-torch", ("forward",), "sonicmoe", _MOE),
    ("MoE layer, bf16, training step", "moe-torch", ("step",), "torch", _MOE),
    ("MoE layer, bf16, training step", "moe-torch", ("step",), "sonicmoe", _MOE),
    ("MoE layer, few tokens", "moe-few-tokens-torch", ("forward",), "torch", _MOE),
    ("MoE layer, few tokens", "moe-few-tokens-torch", ("forward",), "sonicmoe", _MOE),
    ("MoE layer, few tokens", "moe-few-tokens-torch", ("forward",), "triton_kernels", _MOE),
    ("MoE layer on two GPUs, training step", "expert-layer-torch", ("step",), "nccl",
     "layers/expert_parallel"),
    ("transformers, training step", "huggingface", ("step",), "grouped_mm", _MODELS),
    ("transformers, decode in CUDA graphs", "huggingface", ("graph",), "grouped_mm", _MODELS),
]
PEERS = {"torch": "torch", "deepgemm": "DeepGEMM", "sonicmoe": "SonicMoE", "nccl": "NCCL",
         "grouped_mm": "its grouped_mm", "triton_kernels": "triton_kernels"}


def speeds(info):
    """Of an H200: geometric mean, lowest and highest speed over a peer, whose speed is 1."""
    rows = []
    for what, topic, calls, peer, page in ROWS:
        for where, record in records(topic):
            ratios = [case["speed_of_peer"][peer] for case in record["cases"]
                      if (case.get("call") or case["problem"].split()[1]) in calls
                      and peer in case["speed_of_peer"]]
            if "H200" in where and ratios:
                mean = math.exp(math.fsum(map(math.log, ratios)) / len(ratios))
                rows.append([what, PEERS[peer], f"{mean:.2f}", f"{min(ratios):.2f} to "
                             f"{max(ratios):.2f}", len(ratios), where.split(", ")[-1],
                             f"[page](docs/{page}.md)"])
    return markdown(["", "over", "mean", "", "cases", "measured", ""], rows)
