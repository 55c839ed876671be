# SPDX-License-Identifier: Apache-2.0
"""
QLoRA: a base model quantized by bitsandbytes, under peft's adapters, in the Trainer. The base's weights are frozen
bytes: 4 bits each (NF4), with the argument "bf16" stored in bf16 tensors, with "int8" 8 bits.
"""

import sys
import tempfile

import common
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, TrainingArguments

if common.ZEROD:
    from zerod.integrations.transformers import ZerodTrainer as Trainer
else:
    from transformers import Trainer


def base():
    """Return: a small model, quantized while it is loaded from its file."""
    config = LlamaConfig(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, use_cache=False,
                         vocab_size=len(common.WORDS), max_position_embeddings=64)  # fmt: skip
    folder = tempfile.mkdtemp()
    LlamaForCausalLM(config).save_pretrained(folder)
    more = {"bnb_4bit_quant_storage": torch.bfloat16} if "bf16" in sys.argv else {}
    quantized = BitsAndBytesConfig(load_in_8bit=True) if "int8" in sys.argv else BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.float32, **more)  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(folder, quantization_config=quantized, dtype=torch.float32, device_map={"": "cpu"})
    return prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)


model = base()
assert sum(type(param).__name__ in ("Params4bit", "Int8Params") for param in model.parameters()) == 14
torch.manual_seed(4)
lora = LoraConfig(r=8, lora_alpha=16, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
model = get_peft_model(model, lora)
arguments = common.arguments(TrainingArguments, ddp_find_unused_parameters=False)
trainer = Trainer(model=model, args=arguments, train_dataset=common.Text())
trainer.train()
common.report_trainer(trainer)
