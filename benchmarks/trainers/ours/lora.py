"""A small Llama with LoRA and Hugging Face's Trainer, with the job's snapshots."""

from peft import LoraConfig, get_peft_model
from transformers import TrainingArguments

import toy
from hyperpod_ext.integrations.hugging_face import ResilientTrainer
from hyperpod_ext.runtime import Run, resilient


def build():
    return get_peft_model(toy.llama(), LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1))


@resilient
def main(run: Run) -> None:
    args = TrainingArguments(
        output_dir=toy.OUT,
        max_steps=toy.STEPS,
        per_device_train_batch_size=2,
        learning_rate=1e-3,
        logging_steps=4,
        report_to="none",
        use_cpu=True,
        save_strategy="no",
    )
    trainer = ResilientTrainer(run, model=run.keep(build), args=args, train_dataset=toy.Tokens())
    trainer.train()


main()
