"""The shipped suites: published measurements, and what their software did that the tables do not say."""

from __future__ import annotations

from pathlib import Path

from simulator.validation.software import (
    ADDED_BIAS,
    BESIDE,
    COMPOSER,
    KEMPNER_FORGE,
    LLAMA,
    LLM_FOUNDRY,
    MEGATRON,
    MOONLIGHT,
    NEMO,
    NEMO_FAMILIES,
    NORM_BY_OPS,
    TIED_LLAMA,
    VTRAIN,
    deepseek_experts,
)
from simulator.validation.suite import Bounds, Suite
from simulator.validation.traits import SOFTWARE_YEAR

DATA = Path(__file__).parent / "data"


_PROBED_HOSTS = "Each is simulated at the host speed that was probed beside it; hosts of one kind differ twofold."


SUITES: dict[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            name="megatron-2021",
            about="Narayanan et al. 2021, arXiv 2104.04473, table 1 and the 3D rows of table 2: 76B to 530B on A100s",
            table=DATA / "megatron-2021.csv",
            settings=MEGATRON
            | {
                "training.grad_dtype": "fp16",
                # Apex has had the fused accumulation since March 2022 (NVIDIA/apex, pull request 1317).
                "training.gradient_accumulation_fusion": False,
                "parallelism.sequence_parallel": False,
                "parallelism.scatter_gather_p2p": True,
            },
            bounds=Bounds(mean=0.10),
            year=2021,
            measured_by="Narayanan et al. 2021",
        ),
        Suite(
            name="zero3-2021",
            about="Narayanan et al. 2021, table 2, ZeRO-3 rows: 175B with DeepSpeed on 384 and 1,536 A100s",
            table=DATA / "zero3-2021.csv",
            settings={"framework.name": "deepspeed", "training.grad_dtype": "fp16"},
            bounds=Bounds(mean=0.60),
            year=2021,
            measured_by="Narayanan et al. 2021, DeepSpeed",
        ),
        Suite(
            name="megatron-2022",
            about="Korthikanti et al. 2022, arXiv 2205.05198, table 5: 22B to 1T on A100s, full or selective recompute",
            table=DATA / "megatron-2022.csv",
            settings=MEGATRON | ADDED_BIAS,
            bounds=Bounds(mean=0.06),
            year=2022,
            # With sequence parallelism a rank has 1/tp of the activation anyway.
            special=(({"seq_parallel": "n"}, {"parallelism.scatter_gather_p2p": True}),),
            measured_by="Korthikanti et al. 2022",
        ),
        Suite(
            name="zero-bubble",
            about="Qi et al. 2023, arXiv 2401.10241, tables 4 and 7: 1.5B to 28.3B on A100s, 1F1B beside zero bubble",
            table=DATA / "zero-bubble.csv",
            settings=MEGATRON
            | ADDED_BIAS
            | {
                "training.grad_dtype": "fp16",
                "model.tied_embeddings": False,
                # "We deduct one layer from both the initial and last pipeline stage" (section 5.1).
                "parallelism.account_for_embedding": True,
                "parallelism.account_for_loss": True,
            },
            # Their forward passes take 15 to 26 % longer than our kernels, 5 to 8 % of a step; I + W agrees within 2 %.
            # The cause is not known; docs/limits.md lists causes that were ruled out.
            bounds=Bounds(mean=0.13),
            year=2023,
            special=(
                *(({"schedule": schedule}, {"parallelism.overlap": BESIDE}) for schedule in ("ZB-1p", "ZB-2p")),
                # Table 7 has the optimizer that waits for all stages.
                *(({"id": f"zerobubble-t7-00{n}"}, {"parallelism.optimizer_sync": True}) for n in range(1, 5)),
            ),
            measured_by="Qi et al. 2023",
        ),
        Suite(
            name="torch-fsdp",
            about="torchtitan and IBM's fms-fsdp, bf16: Llama of 7B to 70B with FSDP on 8 to 256 H100s and A100s",
            table=DATA / "torch-fsdp.csv",
            # Both clip gradients and compile the transformer blocks, not the loss (torchtitan of 2024 and mid-2025).
            settings={
                "training.grad_clip": 1.0,
                "training.loss": "eager",
                "training.grad_dtype": "fp32",
                # What PyTorch took on an H100 too (meta-pytorch/tritonbench, issue 41, of November 2024).
                "training.attention_kernel": "flash2",
            },
            bounds=Bounds(mean=0.12),
            year=2024,
            special=(
                # fms_fsdp/policies/mixed_precision.py: bfSixteen reduces in bf16; torchtitan's default is fp32.
                ({"software": "fms-fsdp"}, {"training.grad_dtype": "bf16"}),
                ({"model": "Llama2-34B"}, LLAMA),
                # FMS's norm and torch.nn.RMSNorm of 2024 are no kernels; torchtitan of April 2024 had one of Triton
                # (pull request 181), which is assumed for its A100s.
                *(
                    ({"gpu": gpu, "software": software, "framework.compile": "false"}, NORM_BY_OPS)
                    for software, gpu in (
                        ("torchtitan", "H100-96G-HBM2e-500W"),
                        ("fms-fsdp", "A100-80G"),
                        ("fms-fsdp", "H100-80G"),
                    )
                ),
            ),
        ),
        Suite(
            name="kempner-fsdp",
            about="KempnerForge, bf16: Llama of 7B and 13B with FSDP2 on 1 to 8 H200s, 2 to 4 micro-batches",
            table=DATA / "kempner-fsdp.csv",
            settings=KEMPNER_FORGE,
            bounds=Bounds(mean=0.09),
            year=2026,
            note="No constant was fitted to them: what their code does is simulated as its source says.",
        ),
        Suite(
            name="kempner-tp",
            about="the same with tensor parallelism that gathers the input of each product: 7B to 175B on 2 to 360",
            table=DATA / "kempner-tp.csv",
            settings=KEMPNER_FORGE | {"parallelism.gather_per_product": True},
            bounds=Bounds(mean=0.12),
            year=2026,
            measured_by="KempnerForge",
        ),
        Suite(
            name="llm-foundry",
            about="llm-foundry, bf16: MPT of 125M to 70B with FSDP on 8 to 512 A100s and H100s, to 2,048 tokens",
            table=DATA / "llm-foundry.csv",
            settings=LLM_FOUNDRY,
            bounds=Bounds(mean=0.12),
            year=2023,
            special=COMPOSER,
            measured_by="llm-foundry",
        ),
        Suite(
            name="llm-foundry-long",
            about="the same from 4,096 to 65,536 tokens, where attention is most of a step",
            table=DATA / "llm-foundry-long.csv",
            settings=LLM_FOUNDRY,
            bounds=Bounds(mean=0.08),
            year=2023,
            special=COMPOSER,
            measured_by="llm-foundry",
            evidence=False,
        ),
        Suite(
            name="llama-factory",
            about="LLaMA-Factory, QLoRA: Llama 2 7B with 4-bit weights on one A100 of 40 GB, 1,024 to 32,768 tokens",
            table=DATA / "llama-factory.csv",
            # bitsandbytes' 4-bit weights and PEFT's adapters in Hugging Face's modules; plain PyTorch stands for these.
            settings={
                "framework.name": "pytorch",
                "training.grad_dtype": "bf16",
                "training.fused_rms_norm": False,
                "training.attention_kernel": "flash2",
                "training.adapters": {"rank": 8, "targets": ["q", "k", "v", "o", "gate", "up", "down"]},
                "training.base": "nf4",
                "training.optimizer": {"master_weights": False},
            },
            bounds=Bounds(mean=0.13),
            year=2024,
            measured_by="LLaMA-Factory",
        ),
        Suite(
            name="vtrain-multi",
            about="Bang et al. 2024 (vTrain), arXiv 2312.12391: Megatron-DeepSpeed, 3.6B to 175B on 64 to 512 A100s",
            table=DATA / "vtrain-multi.csv",
            settings=VTRAIN,
            bounds=Bounds(mean=0.12),
            year=2023,
            measured_by="vTrain",
        ),
        Suite(
            name="vtrain-single",
            about="the same on 2 to 8 A100s of a node: every 24th of 1,440 small steps, half of which wait for hosts",
            table=DATA / "vtrain-single.csv",
            settings=VTRAIN,
            bounds=Bounds(mean=0.12),
            year=2023,
            measured_by="vTrain",
        ),
        Suite(
            name="internevo",
            about="InternEvo: InternLM 7B with ZeRO-1 on 8 to 1,024 A100s",
            table=DATA / "internevo.csv",
            # Its own modules with FlashAttention 2; plain PyTorch's stand for them.
            settings=LLAMA | {"framework.name": "pytorch", "training.attention_kernel": "flash2"},
            bounds=Bounds(mean=0.20),
            year=2024,
            measured_by="InternEvo",
        ),
        Suite(
            name="simumax-b200",
            about="SimuMax, docs/b200: Llama 3 and DeepSeek layers on 8 B200s, Megatron-LM with TransformerEngine 2.11",
            table=DATA / "simumax-b200.csv",
            settings={
                # --clip-grad of simu_tools/megatron_scripts/scripts, and the rows' "fused cross-entropy".
                "training.grad_clip": 1.0,
                "training.loss": "te_fused",
                "parallelism.overlap": {"grad_reduce": False, "param_gather": False, "p2p": False},
            },
            bounds=Bounds(mean=0.11),
            year=2026,
            special=(
                *(({"cp": cp}, {"parallelism.cp_method": "ulysses"}) for cp in ("4", "8")),  # "CP comm type a2a"
                # "first layer dense ... expert capacity factor 1 padded (balanced)". Routers have Megatron's default,
                # and experts a loss: run_pretrain_deepseekv2.sh has no --moe-router-fusion, and seq_aux_loss. Latent
                # attention rotates by a fused kernel only with --enable-experimental, which it has not either.
                (
                    {"n_experts": "256"},
                    {
                        "model.mtp_layers": 0,
                        "model.moe": deepseek_experts(256, 8, 2048, 1),
                        "training.unfused": ["rotation", "router"],
                    },
                ),
                (
                    {"n_experts": "160"},
                    {"model.moe": deepseek_experts(160, 6, 1536, 2), "training.unfused": ["rotation", "router"]},
                ),
            ),
            measured_by="SimuMax",
        ),
        Suite(
            name="megatron-bridge",
            about="NVIDIA Megatron-Bridge: Moonlight, Qwen3, GPT-OSS, Mixtral on 8 to 256 H100s, H200s and B200s",
            table=DATA / "megatron-bridge.csv",
            # grad_reduce_in_fp32=False, expert_tensor_parallel_size=1 in all of its performance recipes; clip_grad=1 in
            # recipes/utils/optimizer_utils.py. Qwen3 has a loss that balances experts (models/qwen/qwen_provider.py,
            # aux_loss). GPT-OSS rotates by PyTorch's kernels: YaRN scales cosines by 1.35
            # (models/gpt_oss/gpt_oss_provider.py: yarn_mscale None), which Transformer Engine's kernel cannot
            # (megatron/core/models/common/embeddings/rope_utils.py, apply_rotary_pos_emb).
            settings={
                "training.grad_clip": 1.0,
                "parallelism.zero": 1,
                "training.grad_dtype": "bf16",
                "parallelism.etp": 1,
            },
            bounds=Bounds(mean=0.25),
            # All rows but three of container 25.11 and one of NeMo 24.07.
            year=2026,
            special=(
                ({"model": "Moonlight-16B"}, MOONLIGHT),
                # Megatron-Core overlaps transfers of interleaved stages only.
                ({"pp": "4", "vpp": ""}, {"parallelism.overlap": {"p2p": False}}),
            ),
            measured_by="Megatron-Bridge",
        ),
        Suite(
            name="torch-fp8",
            about="torchtitan with torchao's float8 and 8-bit gathers: Llama 3 8B on 8 to 128 H100s and H200s",
            table=DATA / "torch-fp8.csv",
            settings=LLAMA
            | {
                "framework.name": "torchtitan",
                "framework.compile": True,
                "training.grad_clip": 1.0,
                "training.grad_dtype": "fp32",
                # Torchtitan names its kernels of attention: in mid-2025 cuDNN's on B200s alone (pull request 1196).
                "training.attention_kernel": "flash2",
            },
            bounds=Bounds(mean=0.08),
            year=2025,
            # As in torch-fsdp; the H200s' runs are later, and compile the loss.
            special=(({"gpu": "H100-96G-HBM2e-500W"}, {"training.loss": "eager"}),),
            measured_by="torchtitan, float8",
        ),
        Suite(
            name="megatron-blackwell",
            about="NeMo and Megatron-Bridge 25.04 to 26.06: Llama 3, Nemotron 4, GPT-3 of 8B to 405B in 8 and 4 bits, "
            "on H100s, B200s and racks of GB200 and GB300",
            table=DATA / "megatron-blackwell.csv",
            settings=NEMO,
            bounds=Bounds(mean=0.15),
            year=2025,
            special=NEMO_FAMILIES,
            measured_by="NeMo, fp8",
        ),
        Suite(
            name="megatron-fp8",
            about="NeMo with Transformer Engine's delayed scaling: GPT, Llama, Nemotron of 5B to 405B, H100s and B200s",
            table=DATA / "megatron-fp8.csv",
            settings=NEMO,
            bounds=Bounds(mean=0.15),
            year=2024,
            special=(
                *NEMO_FAMILIES,
                # NeMo-Framework-Launcher, launcher_scripts/conf/training/gpt3.
                ({"family": "gpt"}, {"model.dropout": 0.1}),
                # NeMo's tp_comm_overlap, on where there is tensor parallelism in its performance recipes.
                *(({"tp": tp}, {"parallelism.overlap": {"tp": True}}) for tp in ("2", "4", "8")),
            ),
            measured_by="NeMo, fp8",
        ),
        Suite(
            name="own-h200",
            about="our own runs of calibration/runs with plain PyTorch on 1, 2 and 4 H200s, of every layout",
            table=DATA / "own-h200.csv",  # made by `python -m calibration.compare.suite`
            settings={},
            bounds=Bounds(mean=0.04),
            year=SOFTWARE_YEAR,
            note=_PROBED_HOSTS,
            measured_by="own runs, plain PyTorch",
        ),
        Suite(
            name="own-frameworks",
            about="our own runs of torchtitan, DeepSpeed, Megatron-Core and transformers, unchanged, on 1 and 2 H200s",
            table=DATA / "own-frameworks.csv",  # made by `python -m calibration.compare.suite`
            settings={},
            bounds=Bounds(mean=0.05),
            year=SOFTWARE_YEAR,
            note=_PROBED_HOSTS,
            measured_by="own runs, training code of others",
        ),
        Suite(
            name="own-fp8",
            about="our own runs of torchtitan with torchao 0.18 on an H200: bf16, and float8 by tensors and by rows",
            table=DATA / "own-fp8.csv",  # made by `python -m calibration.compare.suite`
            settings={},
            bounds=Bounds(mean=0.06),
            year=SOFTWARE_YEAR,
            note=_PROBED_HOSTS,
            measured_by="own runs, torchtitan with torchao",
        ),
        Suite(
            name="hugging-face",
            about="our own runs of transformers 5.17 on 1 and 2 H200s, eager, compiled and under autocast",
            table=DATA / "hugging-face.csv",
            settings={"framework.name": "hugging_face"},
            bounds=Bounds(mean=0.04, row=0.10),
            year=SOFTWARE_YEAR,
            special=(
                ({"family": "gpt2"}, {"model.dropout": 0.1}),
                ({"family": "llama"}, TIED_LLAMA),
                ({"family": "moe"}, LLAMA),
            ),
            note="Eager GPT-2 and experts are simulated at the host speed measured in them; others' is not known.",
            measured_by="own runs, transformers",
        ),
    )
}
