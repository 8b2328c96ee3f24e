"""Token files in LiBai's mmap format, cut into blocks; split into training, validation, test."""

from libai.config import LazyCall
from libai.data import build_nlp_train_val_test_loader
from libai.data.datasets import GPT2Dataset

from libai_projects.text.indexed_dataset import get_indexed_dataset
from libai_projects.text.tokenizer import GPT2Tokenizer

tokenization = {
    "tokenizer": LazyCall(GPT2Tokenizer)(vocab_file="vocab.json", merges_file="merges.txt"),
    "append_eod": False,
    "make_vocab_size_divisible_by": 128,
}

dataloader = {
    "train": LazyCall(build_nlp_train_val_test_loader)(
        dataset=[
            LazyCall(GPT2Dataset)(
                data_prefix="text_document",
                indexed_dataset=LazyCall(get_indexed_dataset)(
                    # One key to change: the dataset's own.
                    data_prefix="${..data_prefix}",
                    data_impl="mmap",
                    skip_warmup=True,
                ),
                max_seq_length="${model.cfg.max_seq_length}",
            )
        ],
        # Shares of training, validation and test data.
        splits=[[949.0, 50.0, 1.0]],
        weights=[1.0],
        num_workers=4,
    ),
    # A list of loaders (build_nlp_test_loader), evaluated besides the splits above.
    "test": [],
}
