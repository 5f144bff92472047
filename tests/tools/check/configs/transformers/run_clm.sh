#!/bin/bash
# one node of eight GPUs
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
MODEL=openai-community/gpt2-xl
OUT=runs/clm

deepspeed --num_gpus 8 run_clm.py \
    --model_name_or_path $MODEL \
    --dataset_name wikitext --dataset_config_name wikitext-2-raw-v1 \
    --block_size 256 \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps=4 \
    --learning_rate 1e-4 --optim adamw_torch \
    --bf16 --do_train --do_eval \
    --deepspeed ../deepspeed/zero3-auto.json \
    --output_dir $OUT
