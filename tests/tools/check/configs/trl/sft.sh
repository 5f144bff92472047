accelerate launch --config_file ../accelerate/zero3.yaml --num_processes 8 trl/scripts/sft.py \
    --model_name_or_path Qwen/Qwen3-8B \
    --dataset_name trl-lib/Capybara \
    --max_length 128 \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 2 \
    --packing --attn_implementation flash_attention_2 \
    --output_dir out
