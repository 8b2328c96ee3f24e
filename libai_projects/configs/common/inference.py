"""How generation draws tokens, and how its processes are laid out."""

from libai_projects.generation import GenerationOptions
from libai_projects.inference import text_pipeline

# The options that KEY=VALUE changes; what is not here has the default of GenerationOptions, and the
# tokens that begin and end a text are the tokenizer's.
_NAMES = {
    *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
    *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
    *("no_repeat_ngram_size", "num_return_sequences", "use_cache", "pad_token_id", "seed"),
}
generation = GenerationOptions(**text_pipeline.DEFAULT_OPTIONS).model_dump(include=_NAMES)

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
