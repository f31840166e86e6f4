"""transformers 5: Trainer over LlamaForCausalLM, timed from step to step."""

from __future__ import annotations

import tempfile

import common as c

settings = c.arguments()

import torch  # noqa: E402 (after the number of threads is set)
import transformers  # noqa: E402


def main() -> None:
    torch.set_num_threads(settings.threads)
    torch.manual_seed(c.SEED)
    transformers.logging.set_verbosity_error()
    meter = c.Meter("transformers", settings)

    class Timed(transformers.TrainerCallback):
        def on_step_begin(self, args, state, control, **kwargs):
            if state.global_step == 0:
                meter.start()

        def on_step_end(self, args, state, control, **kwargs):
            meter.step(c.ROWS * c.SEQ, None)

        def on_log(self, args, state, control, logs=None, **kwargs):
            if logs and "loss" in logs:
                meter.losses.append(logs["loss"])

    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=c.VOCAB,
            hidden_size=c.DIM,
            intermediate_size=c.FFN,
            num_hidden_layers=c.LAYERS,
            num_attention_heads=c.HEADS,
            num_key_value_heads=c.KV_HEADS,
            max_position_embeddings=4096,
            rms_norm_eps=c.NORM_EPS,
            tie_word_embeddings=False,
            use_cache=False,
            pad_token_id=c.PAD,
            bos_token_id=c.BOS,
            eos_token_id=c.EOS,
            attn_implementation="sdpa",
        )
    )
    # It shifts labels itself: a row of SEQ tokens is trained on SEQ - 1 of them.
    rows = [torch.tensor(row) for row in c.rows(c.ROWS * settings.steps, c.SEQ)]
    with tempfile.TemporaryDirectory() as folder:
        trainer = transformers.Trainer(
            model=model,
            args=transformers.TrainingArguments(
                output_dir=folder,
                max_steps=settings.steps,
                per_device_train_batch_size=c.ROWS,
                learning_rate=3e-4,
                weight_decay=0.1,
                adam_beta2=0.95,
                max_grad_norm=1.0,
                lr_scheduler_type="constant",
                optim="adamw_torch_fused",
                use_cpu=True,
                bf16=settings.dtype == "bf16",
                torch_compile=bool(settings.compile),
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
                seed=c.SEED,
            ),
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            data_collator=transformers.default_data_collator,
            callbacks=[Timed()],
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    meter.report()


if __name__ == "__main__":
    main()
