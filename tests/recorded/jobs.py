"""The jobs whose results are recorded: id -> what is simulated.

Every kind of job that the simulator plays is there, as small as shows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class RecordedJob:
    """The two arguments of `simulator.run`: a workload (its mapping, shipped name or file), and the keys to change."""

    workload: Mapping[str, Any] | str
    changes: Mapping[str, Any] = field(default_factory=dict)


#: The software that runs a step.
EAGER: dict[str, Any] = {"framework": "pytorch"}
COMPILED: dict[str, Any] = {"framework": {"name": "pytorch", "compile": True}}

GPT = {"layers": 4, "hidden": 1024, "heads": 16, "vocab": 4096}
LLAMA = {
    **{"layers": 4, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn_hidden": 2816, "vocab": 4000},
    **{"activation": "swiglu", "norm": "rmsnorm", "position": "rope", "bias": False, "tied_embeddings": False},
}
MOE = {"experts": 8, "top_k": 2, "ffn_hidden": 512}
#: Latent attention has keys and values for each of the 16 heads.
LATENT = {
    "kv_heads": 16,
    "mla": {"q_lora_rank": 256, "kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64},
}


def gpt(
    parallelism: Mapping[str, Any] | None = None,
    training: Mapping[str, Any] | None = None,
    model: Mapping[str, Any] | None = None,
    cluster: Mapping[str, Any] | str = "dgx_a100",
    sizes: Mapping[str, Any] = GPT,
    **sections: Any,
) -> RecordedJob:
    """A small model on DGX A100s, with these keys laid over its sections."""
    return RecordedJob(
        {
            "name": "recorded",
            "model": {**sizes, **(model or {})},
            "training": {"seq": 512, "global_batch": 16, **(training or {})},
            "parallelism": dict(parallelism or {}),
            "cluster": cluster,
            **sections,
        }
    )


def llama(
    parallelism: Mapping[str, Any] | None = None, training: Mapping[str, Any] | None = None, **more: Any
) -> RecordedJob:
    """The same with grouped queries, RMSNorm, SwiGLU and a projection of its own."""
    return gpt(parallelism, training, sizes=LLAMA, **more)


def experts(parallelism: Mapping[str, Any], moe: Mapping[str, Any] | None = None, **more: Any) -> RecordedJob:
    """Layers of eight experts; ``moe`` lies over their section."""
    model = {"moe": {**MOE, **(moe or {})}, **more.pop("model", {})}
    return llama(parallelism, more.pop("training", None), model=model, **more)


def shipped() -> dict[str, RecordedJob]:
    """Every workload that is shipped; the long ones with fewer layers, stages, replicas and micro-batches."""

    def stages(counts: list[int], pp: int, **parallelism: int) -> dict[str, Any]:
        keys = {"pp": pp, "vpp": len(counts) // pp, **parallelism, "layers_per_stage": counts}
        return {"model.layers": sum(counts), **{f"parallelism.{key}": value for key, value in keys.items()}}

    changes: dict[str, dict[str, Any]] = {
        "deepseek_v3": {**stages([1, 2, 2, 1], 2, dp=8, ep=16), "training.global_batch": 32},
        "deepseek_v3_dualpipe": {**stages([3, 1, 1, 1], 4, dp=8, ep=8), "training.global_batch": 64},
        "gpt175b_3d": {**stages([2, 2, 2, 2], 4, dp=4), "training.global_batch": 32},
        "gpt22b_tp8": {"model.layers": 12},
        "gpt3_13b_zero2": {"model.layers": 10, "training.global_batch": 32},
        "gpt3_175b_256": {**stages([2, 2, 2, 2], 4, dp=4), "training.global_batch": 32},
        "llama2_70b_64": {**stages([5, 5], 2, dp=4), "training.global_batch": 32},
        "llama2_7b_zero2": {"model.layers": 8},
        "llama3_405b": {**stages([0, *[1] * 6, 0], 4, dp=4), "training.global_batch": 32, "cluster.nodes": 16},
        "llama3_405b_131k": {**stages([0, 1, 1, 0], 2, dp=2, cp=4), "training.global_batch": 8, "cluster.nodes": 16},
        "llama3_70b": {"model.layers": 20, "training.global_batch": 16},
        "llama3_8b_dgx_h100": {"model.layers": 8, "training.recompute.layers": 6, "training.global_batch": 64},
        "mixtral_8x7b": {**stages([1] * 8, 4, dp=8), "training.global_batch": 64},
        "palm_540b_1024": {
            **stages([1, 2, 2, 1], 4, dp=2),
            "training.global_batch": 16,
            "training.recompute.layers": 1,
        },
        "qwen3_235b": {**stages([1, 2, 2, 2, 2, 2, 2, 1], 4, dp=4, ep=8), "training.global_batch": 32},
    }
    names = sorted(path.stem for path in (ROOT / "workloads").glob("*.yaml"))
    return {name: RecordedJob(name, changes.get(name, {})) for name in names}


def measured() -> dict[str, RecordedJob]:
    """The workload of every run that was made on real GPUs; long ones with fewer micro-batches or layers.

    But for those of narrow models, whose counts the fit of hosts holds (``tests/calibration/test_fit.py``).
    """
    changes: dict[str, dict[str, Any]] = {
        "pp8_zbv_h4096_l16_b32": {"training.global_batch": 8},
        "pp8_interleaved_zb_h4096_l16_b32": {"training.global_batch": 16},
        "pp8_interleaved_h4096_l16_b32": {"training.global_batch": 16},
        "pp8_dualpipe_v_h4096_l16_b32": {"training.global_batch": 16},
        "pp8_1f1b_h4096_l16_b32": {"training.global_batch": 16},
        "pp8_gpipe_h4096_l16_b32": {"training.global_batch": 16},
        "pp4_zbv_h4096_l16": {"model.layers": 8},
        "tp2_pp2_h4096_l16": {"model.layers": 8},
    }
    paths = sorted(path for path in (ROOT / "calibration/runs").glob("*/*.yaml") if path.parent.name != "hosts")
    return {path.stem: RecordedJob(str(path), changes.get(path.stem, {})) for path in paths}


SCHEDULES: dict[str, RecordedJob] = {
    "schedule_naive": gpt({"pp": 2, "schedule": "naive"}),
    "schedule_gpipe": gpt({"pp": 4, "schedule": "gpipe"}),
    "schedule_1f1b": gpt({"pp": 4, "dp": 2, "zero": 1, "schedule": "1f1b"}),
    "schedule_1f1b_in_line": gpt({"pp": 4, "overlap": {"p2p": False}}),
    "schedule_1f1b_eager_batch_p2p": gpt({"pp": 4, "batch_p2p": True}, **EAGER),
    "schedule_interleaved": llama({"pp": 2, "vpp": 2, "schedule": "interleaved"}),
    "schedule_looped_bfs": llama({"pp": 2, "vpp": 2, "dp": 2, "schedule": "looped_bfs", "zero": 2}),
    "schedule_zb_h1": llama({"pp": 4, "schedule": "zb_h1"}),
    "schedule_zb_h2": llama({"pp": 2, "schedule": "zb_h2"}, {"global_batch": 8}),
    "schedule_zb_auto": llama({"pp": 2, "schedule": "zb_auto", "zb_memory_limit": 1.5}, {"global_batch": 8}),
    "schedule_interleaved_zb": llama({"pp": 2, "vpp": 2, "schedule": "interleaved_zb"}, {"global_batch": 8}),
    "schedule_zb_v": llama({"pp": 2, "schedule": "zb_v"}, {"global_batch": 8}),
    "schedule_dualpipe_v": llama({"pp": 2, "schedule": "dualpipe_v"}, {"global_batch": 8}),
    "schedule_dualpipe": experts({"pp": 2, "dp": 2, "ep": 2, "schedule": "dualpipe"}, training={"recompute": "full"}),
    "schedule_async_1f1b": gpt({"pp": 2, "schedule": "async_1f1b"}, {"global_batch": 8}),
}


def offload_cluster(gpus: int = 4) -> dict[str, Any]:
    """Nodes whose hosts have memory and drives of known speed."""
    return {
        "name": "inline",
        "node": {
            "gpus": {"type": "a100-sxm-80gb", "count": gpus},
            "nvlink": {"kind": "nvswitch", "bandwidth_Bps": 300e9},
            "pcie": {"generation": 4, "gpus_per_switch": 2},
            "nics": {"count": 1, "bandwidth_bps": 200e9, "latency_s": 2e-6},
            "host_memory_bandwidth_Bps": 400e9,
            "host_memory_bytes": 1e12,
            "nvme": {"count": 4, "read_Bps": 7e9, "write_Bps": 4e9},
        },
    }


def offloaded(places: Mapping[str, str], **parallelism: Any) -> RecordedJob:
    return llama({"dp": 4, "offload": dict(places), **parallelism}, cluster=offload_cluster())


DATA_PARALLEL: dict[str, RecordedJob] = {
    "dp_zero0": gpt({"dp": 4}),
    "dp_zero0_clip": gpt({"dp": 4}, {"grad_clip": 1.0}),
    "dp_zero0_in_line": gpt({"dp": 4, "overlap": {"grad_reduce": False}}),
    "dp_zero0_small_buckets": gpt({"dp": 4, "bucket_bytes": 1_000_000, "copy_to_buckets": True}),
    "dp_zero1": gpt({"dp": 4, "zero": 1}, {"grad_clip": 1.0}),
    "dp_zero1_in_line": gpt({"dp": 4, "zero": 1, "overlap": {"grad_reduce": False, "param_gather": False}}),
    "dp_zero2": gpt({"dp": 8, "zero": 2}),
    "dp_zero3": gpt({"dp": 8, "zero": 3}),
    "dp_zero3_keeps": llama({"dp": 4, "zero": 3, "reshard_after_forward": False, "prefetch": 2}),
    "dp_zero3_no_prefetch": llama({"dp": 4, "zero": 3, "prefetch": 0}),
    "dp_ddp_eager": llama({"dp": 4}, {"grad_dtype": "bf16"}, **EAGER),
    "dp_fsdp_eager": llama({"dp": 4, "zero": 3}, **EAGER),
    "dp_fsdp_adds_whole": llama({"dp": 4, "zero": 3, "sync_each_micro_batch": False}, **EAGER),
    "dp_fsdp_stages": llama({"dp": 2, "pp": 2, "zero": 3}, framework="torchtitan"),
    "dp_fsdp_compiled_nodes": llama({"dp": 16, "zero": 3}, **COMPILED),
    "dp_hsdp_zero1": gpt({"dp": 16, "zero": 1, "hsdp": 8}),
    "dp_hsdp_zero3": gpt({"dp": 16, "zero": 3, "hsdp": 8}, **EAGER),
    "dp_servers": gpt({"dp": 4, "data_parallel": "parameter_server", "servers": 2}, cluster=offload_cluster(2)),
    "dp_servers_in_line": gpt(
        {"dp": 4, "data_parallel": "parameter_server", "overlap": {"grad_reduce": False}}, cluster=offload_cluster(1)
    ),
    "dp_async": gpt({"dp": 2, "data_parallel": "async"}, {"global_batch": 4}, cluster=offload_cluster(1)),
    "dp_async_slow_gpu": gpt(
        {"dp": 2, "data_parallel": "async"},
        {"global_batch": 4},
        cluster={**offload_cluster(1), "overrides": [{"gpu": "node0.gpu0", "speed_scale": 0.6}]},
    ),
    "offload_optimizer_cpu": offloaded({"optimizer": "cpu"}),
    "offload_optimizer_cpu_zero2": offloaded({"optimizer": "cpu"}, zero=2),
    "offload_optimizer_nvme": offloaded({"optimizer": "nvme"}, zero=1),
    "offload_parameters_cpu": offloaded({"parameters": "cpu"}, zero=3),
    "offload_parameters_nvme": offloaded({"parameters": "nvme", "optimizer": "cpu"}, zero=3),
    "offload_activations_cpu": offloaded({"activations": "cpu"}),
    "offload_activations_nvme_pp": offloaded({"activations": "nvme", "optimizer": "cpu"}, dp=2, pp=2, zero=1),
    "compression_fp8": gpt({"dp": 8, "grad_compression": "fp8"}),
    "compression_int8": gpt({"dp": 16, "zero": 2, "grad_compression": "int8"}),
    "compression_1bit": gpt({"tp": 2, "dp": 2, "pp": 2, "grad_compression": "1bit"}),
    "dp_tree": gpt({"dp": 16, "collective_algorithm": "tree"}),
    "dp_hierarchical": gpt({"dp": 16, "collective_algorithm": "hierarchical"}),
    "dp_rank_order": gpt({"tp": 2, "dp": 4, "pp": 2, "zero": 1, "rank_order": "dp-cp-tp-pp"}),
}

TRAINING: dict[str, RecordedJob] = {
    "fused": llama({"tp": 2, "dp": 2}),
    "fused_apart": llama({"tp": 2, "dp": 2}, {"gradient_accumulation_fusion": False}),
    "eager": llama({"tp": 2, "dp": 2}, **EAGER),
    "eager_old": llama({"dp": 2}, {"fused_rms_norm": False, "attention_kernel": "flash2"}, **EAGER),
    "eager_keeps_gradients": llama({"dp": 2, "zero": 1}, {"keep_gradients": True}, **EAGER),
    "compiled": llama({"tp": 2, "dp": 2}, **COMPILED),
    "compiled_eager_loss": llama({"dp": 2}, {"loss": "eager"}, **COMPILED),
    "recompute_selective": gpt({"dp": 2}, {"recompute": "selective"}, model={"attention": "unfused", "dropout": 0.1}),
    "recompute_full": gpt({"pp": 2}, {"recompute": "full"}),
    "recompute_some": gpt({"dp": 2}, {"recompute": {"granularity": "full", "layers": 2}}),
    "recompute_ops": llama({"dp": 2}, {"recompute": "ops"}, **EAGER),
    "recompute_modules": experts(
        {"dp": 4, "ep": 2},
        {"shared_experts": 1, "first_dense_layers": 1},
        model=LATENT,
        training={
            "recompute": {
                "granularity": "selective",
                "modules": ["core_attn", "layernorm", "mla_up_proj", "mlp", "moe_act", "shared_experts"],
            }
        },
    ),
    "recompute_moe": experts(
        {"dp": 2, "ep": 2}, training={"recompute": {"granularity": "selective", "modules": ["moe"]}}
    ),
    "fp32": gpt({"dp": 2}, {"precision": "fp32"}),
    "fp16": gpt({"pp": 2, "dp": 2}, {"precision": "fp16", "grad_dtype": "fp16", "grad_clip": 1.0}),
    "bf16_states": llama(
        {"dp": 2}, {"grad_dtype": "bf16", "optimizer": {"master_weights": False, "state_dtype": "bf16"}}
    ),
    "micro_batch_4": gpt({"dp": 2}, {"micro_batch": 4}),
    "sliding_window": llama({"dp": 2}, {"seq": 2048}, model={"sliding_window": 512}),
    "long_run": gpt({"dp": 2}, {"total_tokens": 1e9}, model={"position": "none", "activation": "relu"}),
    "tied": gpt({"pp": 2, "dp": 2}, model={"tied_embeddings": True}),
    "untied": gpt({"pp": 2, "dp": 2}, model={"tied_embeddings": False}),
    "uneven_stages": gpt({"pp": 2, "layers_per_stage": [1, 3]}),
    "embedding_counts": gpt({"pp": 2, "account_for_embedding": True, "account_for_loss": True}),
    "geglu": llama({"tp": 2}, model={"activation": "geglu"}),
}

EXPERTS: dict[str, RecordedJob] = {
    "moe": experts({"dp": 4, "ep": 4}),
    "moe_eager": experts({"dp": 2, "ep": 2}, **EAGER),
    "moe_skew": experts({"dp": 4, "ep": 4}, {"token_distribution": {"skew": 0.5}}, seed=3),
    "moe_list": experts({"dp": 2, "ep": 2}, {"token_distribution": [8, 4, 2, 2, 1, 1, 1, 1]}),
    "moe_redundant": experts({"dp": 4, "ep": 4}, {"token_distribution": {"skew": 0.8}, "redundant_experts": 4}),
    "moe_shared": experts({"dp": 4, "ep": 4, "zero": 1}, {"shared_experts": 1, "first_dense_layers": 1}),
    "moe_shared_overlap": experts({"dp": 4, "ep": 4, "overlap": {"ep": True}}, {"shared_experts": 2}),
    "moe_every_other": experts({"dp": 2, "ep": 2, "pp": 2}, {"every": 2}),
    "moe_capacity": experts({"dp": 2, "ep": 2}, {"capacity_factor": 1.25}),
    "moe_capacity_unpadded": experts(
        {"dp": 2, "ep": 2}, {"capacity_factor": 1.0, "pad_to_capacity": False, "token_distribution": {"skew": 0.5}}
    ),
    "moe_nodes": experts({"dp": 16, "ep": 16}, {"experts": 32, "top_k": 8, "node_limit": 1}),
    "moe_tp_etp": experts({"tp": 2, "dp": 4, "ep": 2, "etp": 2, "zero": 2}),
    "moe_folded": experts({"tp": 2, "dp": 2, "ep": 4, "etp": 1}),
    "moe_cp": experts({"cp": 2, "dp": 2, "ep": 4}),
    "moe_fsdp": experts({"dp": 4, "ep": 2, "zero": 3}, **EAGER),
    "moe_mla_zb": experts({"dp": 2, "ep": 2, "pp": 2, "schedule": "zb_h1"}, model=LATENT),
    "mla": llama({"tp": 2}, model=LATENT),
    "mtp": llama({"pp": 2}, model={"mtp_layers": 1}),
    "mtp_two": experts({"dp": 2, "ep": 2}, model={"mtp_layers": 2, **LATENT}),
}

SPLIT: dict[str, RecordedJob] = {
    "cp_ring": llama({"cp": 2, "dp": 2}, {"seq": 2048}),
    "cp_ring_contiguous": llama({"cp": 4, "cp_layout": "contiguous"}, {"seq": 2048}),
    "cp_ring_tp_nodes": llama({"tp": 4, "cp": 4}, {"seq": 4096}),
    "cp_ulysses": llama({"cp": 2, "dp": 2, "cp_method": "ulysses", "zero": 1}, {"seq": 2048}),
    "tp_sequence_parallel": gpt({"tp": 4}),
    "tp_plain": gpt({"tp": 4, "sequence_parallel": False}),
    "tp_overlap": gpt({"tp": 4, "overlap": {"tp": True}}, {"seq": 2048}),
    "tp_plain_overlap": gpt({"tp": 4, "sequence_parallel": False, "overlap": {"tp": True}}, {"seq": 2048}),
    "tp_eager": llama({"tp": 4, "sequence_parallel": False}, **EAGER),
    "tp_whole_vocabulary": gpt({"tp": 2, "pp": 2, "vocab_parallel": False}),
    "tp_scatter_gather": gpt({"tp": 4, "pp": 2, "sequence_parallel": False, "scatter_gather_p2p": True}),
    "tp_nvls": gpt({"tp": 8, "sequence_parallel": False}, cluster="dgx_h100"),
    "all_axes": llama({"tp": 2, "cp": 2, "pp": 2, "dp": 2, "zero": 1}, {"seq": 1024, "grad_clip": 1.0}),
    "kept_outputs": gpt({"pp": 2, "deallocate_pipeline_outputs": False}),
    "no_fold": gpt({"tp": 2, "pp": 2, "dp": 2}, simulation={"fold": False}),
    "no_coalesce": gpt({"tp": 2, "pp": 2, "dp": 2}, simulation={"coalesce": False}),
}


def odd(*overrides: Mapping[str, Any], nodes: int = 2, **keys: Any) -> dict[str, Any]:
    return {"name": "dgx_a100", "nodes": nodes, "overrides": list(overrides), **keys}


def fabric(nodes: int, gpus: int, **keys: Any) -> dict[str, Any]:
    """Nodes whose every GPU has an NVLink and a NIC of 10 GB/s."""
    nvlink = {"kind": "nvswitch", "bandwidth_Bps": 300e9, "latency_s": 1e-6} if gpus > 1 else {"kind": "none"}
    node = {
        "gpus": {"type": "a100-sxm-80gb", "count": gpus},
        "nvlink": nvlink,
        "pcie": {"generation": 4},
        "nics": {"count": gpus, "bandwidth_bps": 80e9, "latency_s": 2e-6},
    }
    return {"name": "inline", "nodes": nodes, "node": node, "fabric": keys}


MIXED = {
    "name": "mixed",
    "groups": [{"count": 1, "node": "dgx_h100"}, {"count": 1, "node": "dgx_a100"}],
    "fabric": {"kind": "rail_fat_tree", "tiers": 3, "radix": 40},
}
SITES = {"count": 2, "bandwidth_bps": 40e9, "latency_s": 1e-2, "window_bytes": 20e6}
BETWEEN = [{"from": "node0.nic0", "to": "node1.nic0", "bandwidth_Bps": 5e9}]
TREE = {"top": {}, "left": {"at": "top", "nodes": 2, "bandwidth_Bps": 10e9}, "right": {"at": "top", "nodes": 2}}

CLUSTERS: dict[str, RecordedJob] = {
    "slow_gpu": gpt({"dp": 16}, cluster=odd({"gpu": "node0.gpu3", "speed_scale": 0.7})),
    "slow_host": gpt({"dp": 16}, cluster=odd({"gpu": "node1.gpu2", "host_speed": 0.5, "autograd_speed": 0.8}), **EAGER),
    "slow_nic": gpt({"dp": 16, "zero": 2}, cluster=odd({"link": "node1.nic2", "bandwidth_scale": 0.25})),
    "slow_nics_pp": gpt({"tp": 8, "pp": 2}, cluster=odd({"link": "node1.nic*", "bandwidth_scale": 0.5})),
    "missing_gpu": gpt(
        {"pp": 3, "dp": 5, "layers_per_stage": [1, 2, 1]},
        {"global_batch": 15},
        cluster=odd({"gpu": "node1.gpu4", "missing": True}),
    ),
    "missing_nic": gpt({"dp": 16}, cluster=odd({"nic": "node0.nic3", "missing": True})),
    "background": gpt({"tp": 8, "dp": 2}, cluster=odd(background=BETWEEN)),
    "background_share": gpt({"dp": 16}, cluster=odd(background=[{"link": "node0.nic1:tx", "share": 0.5}])),
    "mixed_nodes": gpt({"dp": 16}, cluster=MIXED),
    "mixed_nodes_pp": gpt({"tp": 8, "pp": 2, "layers_per_stage": [3, 1]}, cluster=MIXED),
    "placement": gpt({"tp": 8, "dp": 2}, cluster=odd(nodes=4), placement=[0, 3]),
    "rail_oversubscribed": gpt({"dp": 8}, cluster=fabric(8, 1, radix=5, oversubscription=4)),
    "rail_three_tiers": gpt({"dp": 16}, cluster=fabric(8, 2, radix=4, tiers=3)),
    "rail_only": experts({"dp": 8, "ep": 8}, cluster=fabric(4, 2, kind="rail_only", radix=4)),
    "fat_tree": gpt({"dp": 8, "zero": 3}, cluster=fabric(4, 2, kind="fat_tree", radix=6)),
    "dragonfly": gpt({"dp": 16}, cluster=fabric(8, 2, kind="dragonfly", radix=7)),
    "torus": gpt({"dp": 6}, {"global_batch": 12}, cluster=fabric(6, 1, kind="torus", shape=[2, 3])),
    "switch_tree": gpt({"dp": 8}, cluster=fabric(4, 2, kind="switch_tree", switches=TREE)),
    "sites": gpt({"dp": 4, "pp": 1}, cluster=fabric(4, 1, kind="fat_tree", sites=SITES)),
    "sharp": gpt({"dp": 16}, cluster={"name": "dgx_h100", "nodes": 2, "fabric": {"sharp": True}}),
    "pcie_l40s": llama({"dp": 8, "zero": 1}, cluster="pcie_l40s"),
    "pcie_pairs": gpt({"tp": 2, "pp": 2}, cluster="pcie_a100_nvlink_pairs"),
    "workstation": llama({"dp": 3}, {"global_batch": 12}, cluster="workstation_3gpu", **EAGER),
    "mesh_v100": gpt({"tp": 4, "dp": 2}, {"precision": "fp16"}, cluster="dgx1_v100"),
    "mi300x": llama({"tp": 4, "dp": 2}, cluster="mi300x"),
    "gb200": llama({"tp": 4, "dp": 18}, {"global_batch": 36}, cluster="gb200_nvl72"),
    "aws_p4d": gpt({"dp": 16, "zero": 1}, cluster="aws_p4d"),
    "gcp_a3_mega": gpt({"dp": 16}, cluster="gcp_a3_mega"),
    "stack_a100_nvswitch": gpt({"dp": 8}, stack="a100-nvswitch"),
    "stack_h100_efa": gpt({"tp": 8, "dp": 2}, cluster="aws_p5", stack="h100-efa"),
    "stack_deepep": experts(
        {"dp": 16, "ep": 16}, {"experts": 16}, cluster={"name": "dgx_h100"}, stack="h100-infiniband-sharp"
    ),
}

#: Products in 8 bits.
EIGHT_BITS: dict[str, RecordedJob] = {
    "fp8_gathered": gpt(
        {"dp": 8, "zero": 3},
        {"fp8": {"recipe": "torchao_tensorwise", "gather": "fp8"}},
        sizes=LLAMA,
        cluster="dgx_h100",
        framework={"name": "torchtitan", "compile": True},
    ),
    "fp8_delayed_pp": gpt({"tp": 2, "pp": 2, "dp": 2}, {"fp8": "te_delayed"}, cluster="dgx_h100"),
    "fp8_blockwise_moe": gpt({"dp": 8, "ep": 4}, {"fp8": "te_blockwise"}, {"moe": MOE}, cluster="dgx_h100"),
    "fp8_mx": gpt({"dp": 8}, {"fp8": "te_mxfp8"}, cluster="dgx_b200"),
}

JOBS: dict[str, RecordedJob] = {}
for part in (SCHEDULES, DATA_PARALLEL, TRAINING, EXPERTS, SPLIT, CLUSTERS, EIGHT_BITS, shipped(), measured()):
    repeated = JOBS.keys() & part.keys()
    if repeated:
        raise ValueError(f"several jobs are called {', '.join(sorted(repeated))}")
    JOBS.update(part)
