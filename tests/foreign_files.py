# SPDX-License-Identifier: Apache-2.0
"""
Typical configuration files of DeepSpeed and accelerate, by their kinds. TRAINS: files that work unchanged. REFUSED:
files that zerod refuses because it would train something else, with the keys that the refusal names.

The keys are from DeepSpeed's manual and pydantic models, and from the examples of transformers, accelerate, axolotl,
LLaMA-Factory, ms-swift and DeepSpeedExamples. The values are chosen for small tests.
"""

import json

BATCH = {"train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}
AUTO = BATCH | {"gradient_clipping": "auto", "bf16": {"enabled": "auto"}, "wall_clock_breakdown": False}
FP16_AUTO = {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
             "min_loss_scale": 1}  # fmt: skip
FP16 = FP16_AUTO | {"enabled": True}
ADAMW = {"type": "AdamW", "params": {"lr": 0.02, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}}
AUTO_ADAMW = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}
CPU = {"device": "cpu", "pin_memory": True}
STAGE2 = {"stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
          "reduce_bucket_size": 2e8, "contiguous_gradients": True}  # fmt: skip
STAGE3 = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
          "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
          "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
          "stage3_gather_16bit_weights_on_model_save": True}  # fmt: skip
AT_ONCE = {"stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 0, "reduce_bucket_size": 0,
           "prefetch_bucket_size": 0, "param_persistence_threshold": 0, "model_persistence_threshold": 0,
           "max_live_parameters": 0, "max_reuse_distance": 0, "gather_16bit_weights_on_model_save": True,
           "module_granularity_threshold": 0, "use_all_reduce_for_fetch_params": False,
           "allgather_sequential": False}  # fmt: skip
ACCELERATE = {"compute_environment": "LOCAL_MACHINE", "debug": False, "distributed_type": "DEEPSPEED", "downcast_bf16": "no",
              "enable_cpu_affinity": False, "machine_rank": 0, "main_training_function": "main", "mixed_precision": "bf16",
              "num_machines": 1, "num_processes": 2, "rdzv_backend": "static", "same_network": True, "tpu_env": [],
              "tpu_use_cluster": False, "tpu_use_sudo": False, "use_cpu": False}  # fmt: skip

TRAINS = {
    "stage 2, all auto": AUTO | {"fp16": FP16_AUTO, "zero_optimization": STAGE2, "optimizer": AUTO_ADAMW,
                                 "zero_allow_untested_optimizer": True},
    "stage 3, offloaded": AUTO | {"zero_optimization": STAGE3 | {"offload_optimizer": CPU, "offload_param": CPU},
                                  "optimizer": AUTO_ADAMW, "steps_per_print": 1e5},
    "stage 3, names without stage3_, and zeros": AUTO | {"zero_optimization": AT_ONCE, "fp16": FP16_AUTO | {"auto_cast": False}},
    "stage 1, compiled": AUTO | {"zero_optimization": {"stage": 1, "overlap_comm": True},
                                 "compile": {"disable": False, "backend": "inductor"}},
    "stage 0": AUTO | {"zero_optimization": STAGE2 | {"stage": 0, "round_robin_gradients": True}, "optimizer": ADAMW},
    "quantization, hpz and MiCS off": AUTO | {"zero_optimization": STAGE3 | {
        "zero_quantized_weights": False, "zero_quantized_gradients": False, "zero_hpz_partition_size": 1,
        "zero_quantized_nontrainable_weights": False, "zeropp_loco_param": None, "mics_shard_size": -1}},
    "MiCS, hpz, a part offloaded": AUTO | {"zero_optimization": STAGE3 | {
        "mics_shard_size": 2, "mics_hierarchical_params_gather": True, "zero_hpz_partition_size": 2,
        "offload_optimizer": CPU | {"ratio": 0.3, "super_offload": True, "cpuadam_cores_perc": 0.5, "buffer_count": 4,
                                    "fast_init": False, "pipeline_read": False, "pipeline_write": False}}},
    "comments that are keys": AUTO | {"_comment": "of ours", "//": "see above", "zero_optimization": STAGE2 | {"__note__": [1]},
                                      "optimizer": {"type": "AdamW", "params": ADAMW["params"] | {"_comment": "tuned"}}},
    "comments of hjson": "// a head\n{ /* all\n auto */ \"train_batch_size\": 8, # and\n"
                         ' "zero_optimization": {"stage": 2}, // not "this": {\n "optimizer": %s }\n' % json.dumps(ADAMW),
    "tabs, a byte order mark, CRLF": "\ufeff" + json.dumps(AUTO | {"optimizer": ADAMW, "zero_optimization": STAGE2},
                                                           indent="\t").replace("\n", "\r\n"),
    "fp16 and WarmupLR": {"fp16": FP16, "zero_optimization": AT_ONCE | {"offload_optimizer": CPU, "offload_param": CPU},
                          "optimizer": ADAMW, "steps_per_print": 2000, "gradient_clipping": 0.1, "scheduler": {
        "type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.03, "warmup_num_steps": 3}}},
    "fp16 with a fixed scale, any minimum": {"train_batch_size": 8, "fp16": FP16 | {"loss_scale": 128, "min_loss_scale": 0.0},
                                             "zero_optimization": {"stage": 1}, "optimizer": ADAMW, "prescale_gradients": True,
                                             "gradient_predivide_factor": 2.0},
    "Adam with L2": {"train_batch_size": 8, "gradient_clipping": 0.0, "zero_optimization": {"stage": 2}, "optimizer": {
        "type": "Adam", "params": ADAMW["params"] | {"adam_w_mode": False, "bias_correction": True, "torch_adam": True}}},
    "Adam without": {"train_batch_size": 8, "gradient_clipping": 0.05, "cuda_visible_devices": 0, "seed": 3, "epochs": 2,
                     "zero_optimization": {"stage": 1}, "optimizer": {"type": "Adam", "params": ADAMW["params"]}},
    "optimizer in small letters": {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "optimizer": {
        "type": "adamw", "params": ADAMW["params"] | {"amsgrad": False, "fused": True, "max_grad_norm": 0}}},
    "SGD": {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "optimizer": {
        "type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "foreach": False}}},
    "Adagrad": {"train_batch_size": 8, "zero_optimization": {"stage": 2}, "optimizer": {
        "type": "adagrad", "params": {"lr": 0.05, "weight_decay": 0.01}}},
    "WarmupDecayLR": {"train_batch_size": 8, "optimizer": ADAMW, "zero_optimization": {"stage": 2}, "scheduler": {
        "type": "WarmupDecayLR", "params": {"warmup_min_lr": 1e-4, "warmup_max_lr": 0.02, "warmup_num_steps": 2,
                                            "warmup_type": "linear", "total_num_steps": 5, "last_batch_iteration": -1}}},
    "WarmupDecayLR, all auto": AUTO | {"optimizer": AUTO_ADAMW, "zero_optimization": STAGE2, "scheduler": {
        "type": "WarmupDecayLR", "params": dict.fromkeys(
            ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")}},
    "WarmupCosineLR": {"train_batch_size": 8, "optimizer": ADAMW, "zero_optimization": {"stage": 1}, "scheduler": {
        "type": "WarmupCosineLR", "params": {"warmup_min_ratio": 0.1, "warmup_num_steps": 0, "cos_min_ratio": 0.01,
                                             "total_num_steps": 6}}},
    "old names": {"train_batch_size": 8, "bfloat16": {"enabled": True}, "optimizer": ADAMW, "allgather_size": 5e8,
                  "zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_params": True, "legacy_stage1": False,
                                        "cpu_offload_use_pin_memory": True, "find_unused_parameters": True,
                                        "stage3_gather_fp16_weights_on_model_save": True}},
    "bf16 with the keys of fp16": AUTO | {"optimizer": ADAMW, "zero_optimization": STAGE3, "bf16": FP16 | {
        "auto_cast": False, "check_grad_overflow": False, "immediate_grad_update": True}, "fp8": {"enabled": False}},
    "types of data and of what is sent": {"train_batch_size": 8, "data_types": {"grad_accum_dtype": "fp32"}, "optimizer": ADAMW,
                                          "communication_data_type": "fp16", "gradient_allreduce_op": "mean", "bf16": {
        "enabled": True}, "zero_optimization": {"stage": 3, "ignore_missing_optim_state": True}},
    "all that is measured and logged": AUTO | {
        "optimizer": ADAMW, "zero_optimization": STAGE2, "flops_profiler": {"enabled": True, "profile_step": 1, "detailed": True},
        "comms_logger": {"enabled": True, "verbose": False, "prof_all": True}, "comms_config": {"verbose": False},
        "monitor_config": {"enabled": True, "csv_monitor": {"enabled": False}}, "tensorboard": {"enabled": True},
        "wandb": {"enabled": True, "project": "p"}, "csv_monitor": {"enabled": True}, "comet": {"enabled": True},
        "timers": {"throughput": {"enabled": True, "synchronized": False}}, "wall_clock_breakdown": True,
        "memory_breakdown": True, "dump_state": True, "log_level": "info"},
    "all that is tuned": AUTO | {
        "optimizer": ADAMW, "zero_optimization": STAGE2 | {"leaf_module": {"names": ["a"]}, "memory_efficient_linear": False},
        "autotuning": {"enabled": True, "fast": True, "metric": "throughput"}, "aio": {"block_size": 1048576, "queue_depth": 8},
        "elasticity": {"enabled": True, "max_train_batch_size": 2000, "micro_batch_sizes": [2, 4]},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": ["torch.nn.Linear"]},
        "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True},
        "hybrid_engine": {"enabled": True, "max_out_tokens": 512}, "checkpoint": {"tag_validation": "Warn",
        "load_universal": False, "use_node_local_storage": False, "parallel_write": {"pipeline_stage": False}},
        "nebula": {"enabled": False}, "dataloader_drop_last": True, "sparse_gradients": True},
    "all that changes the numbers, off": AUTO | {
        "optimizer": ADAMW, "zero_optimization": STAGE2 | {"zenflow": None}, "amp": {"enabled": False, "opt_level": "O1"},
        "progressive_layer_drop": {"enabled": False, "theta": 0.5}, "curriculum_learning": {"enabled": False, "seed": 1},
        "data_efficiency": {"enabled": False, "data_sampling": {"enabled": True}}, "quantize_training": {"enabled": False},
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": False, "quantize_groups": 1},
                                                         "different_groups": {"w": {"params": {"start_bits": 8}}}}},
        "tensor_parallel": {"autotp_size": 1}, "sequence_parallel_size": 1, "expert_parallel": {"enabled": False}},
    "accelerate": ACCELERATE | {"deepspeed_config": {
        "deepspeed_multinode_launcher": "standard", "gradient_accumulation_steps": 1, "gradient_clipping": 0.05,
        "offload_optimizer_device": "none", "offload_param_device": "none", "zero3_init_flag": True,
        "zero3_save_16bit_model": True, "zero_stage": 3}},
    "accelerate that names a DeepSpeed file": ACCELERATE | {"deepspeed_config": {
        "deepspeed_config_file": "beside.json", "zero3_init_flag": False}},
    "accelerate without DeepSpeed": ACCELERATE | {"distributed_type": "MULTI_GPU", "gpu_ids": "all", "fsdp_config": {},
                                                  "megatron_lm_config": {}, "deepspeed_config": {}, "fp8_config": None},
    "accelerate with FSDP": ACCELERATE | {"distributed_type": "FSDP", "fsdp_config": {
        "fsdp_sharding_strategy": "FULL_SHARD", "fsdp_offload_params": False}, "dynamo_config": {"dynamo_backend": "INDUCTOR"}},
}  # fmt: skip
BESIDE = {"train_batch_size": "auto", "gradient_clipping": 0.1, "zero_optimization": STAGE3, "optimizer": ADAMW}

REFUSED = {
    "tensor parallel": (AUTO | {"zero_optimization": STAGE2, "tensor_parallel": {"autotp_size": 2}},
                        ["tensor_parallel.autotp_size"]),
    "sequence parallel": (AUTO | {"zero_optimization": STAGE3, "sequence_parallel": {"enabled": True, "size": 4},
                                  "sequence_parallel_size": 2}, ["sequence_parallel", "sequence_parallel_size"]),
    "pipeline and experts": ({"train_batch_size": 8, "pipeline": {"stages": 2}, "expert_parallel": {
        "enabled": True, "autoep_size": 2}}, ["pipeline", "expert_parallel"]),
    "NVMe": (AUTO | {"aio": {"block_size": 1}, "zero_optimization": STAGE3 | {
        "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}, "offload_param": {"device": "nvme", "nvme_path": "/n"}}},
             ["zero_optimization.offload_optimizer.device", "zero_optimization.offload_param.device"]),
    "ZenFlow": (AUTO | {"zero_optimization": STAGE2 | {"offload_optimizer": CPU, "zenflow": {"topk_ratio": 0.1}}},
                ["zero_optimization.zenflow"]),
    "quantized": (AUTO | {"zero_optimization": STAGE3 | {"zero_quantized_weights": True, "zero_quantized_gradients": True},
                          "quantize_training": {"enabled": True}, "compression_training": {
        "weight_quantization": {"shared_parameters": {"enabled": True}}}},
                  ["zero_optimization.zero_quantized_weights", "zero_optimization.zero_quantized_gradients",
                   "quantize_training", "compression_training"]),
    "masters of 16 bits": (AUTO | {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}, "fp16": {
        "fp16_master_weights_and_grads": True}}, ["bf16.bf16_master_weights_and_grads", "fp16.fp16_master_weights_and_grads"]),
    "another optimizer and schedule": ({"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {
        "lr": 1, "freeze_step": 2, "comm_backend_name": "nccl"}}, "scheduler": {"type": "OneCycle", "params": {
            "cycle_min_lr": 1, "decay_lr_rate": 0}}}, ["optimizer.type", "scheduler.type"]),
    "the engine's data and layers": (AUTO | {"progressive_layer_drop": {"enabled": True}, "curriculum_learning": {
        "enabled": True}, "data_efficiency": {"enabled": True}}, ["progressive_layer_drop", "curriculum_learning",
                                                                  "data_efficiency"]),
    "slips of the pen": (AUTO | {"gradient_cliping": 1, "zero_optimization": STAGE2 | {"overlap_com": True, "stage3": 1},
                                 "optimizer": {"type": "AdamW", "params": {"lr": 1, "beta": [0, 0], "amsgrad": True}}},
                         ["gradient_cliping", "zero_optimization.overlap_com", "zero_optimization.stage3",
                          "optimizer.params.beta", "optimizer.params.amsgrad"]),
    "accelerate with Megatron": (ACCELERATE | {"distributed_type": "MEGATRON_LM", "megatron_lm_config": {
        "megatron_lm_tp_degree": 2}, "parallelism_config": {"parallelism_config_tp_size": 2}},
                                 ["distributed_type", "megatron_lm_config", "parallelism_config.parallelism_config_tp_size"]),
}  # fmt: skip


def write(folder, file):
    """Writes the file, and the file that it may name. Return: its path."""
    path = folder / ("config.json" if not isinstance(file, dict) or "deepspeed_config" not in file else "accelerate.yaml")
    path.write_bytes((file if isinstance(file, str) else json.dumps(file, indent=1)).encode())
    (folder / "beside.json").write_text(json.dumps(BESIDE))
    return path


def settings_of(file):
    """Return: the effective settings, as a dict of DeepSpeed's keys."""
    if isinstance(file, str):
        return {"optimizer": ADAMW, "gradient_clipping": "auto" if "auto\",\r" in file else None}
    more = file.get("deepspeed_config", {})
    if "deepspeed_config_file" in more:
        return BESIDE
    return file | more
