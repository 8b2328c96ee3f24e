"""How generation draws tokens, and how its processes are laid out."""

# The names are those of libai_projects.generation.GenerationOptions; what is not here has the
# default there, and the tokens that begin and end a text are the tokenizer's.
generation = dict(
    max_length=50,
    min_length=0,
    do_sample=False,
    early_stopping=False,
    num_beams=1,
    temperature=1.0,
    top_k=50,
    top_p=1.0,
    typical_p=1.0,
    repetition_penalty=1.0,
    length_penalty=1.0,
    no_repeat_ngram_size=0,
    num_return_sequences=1,
    use_cache=True,
    pad_token_id=0,
    seed=0,
)

train = dict(
    # The seed of random weights.
    seed=1234,
    dist=dict(
        # null: chosen by the number of processes; 4 are tensor 2 x pipeline 2.
        data_parallel_size=None,
        tensor_parallel_size=None,
        pipeline_parallel_size=None,
        pipeline_num_layers=None,
        # A list with the stage of each layer; null shares them out evenly.
        custom_pipeline_stage_id=None,
        # null: what the device layer chooses.
        device_type=None,
    ),
)
