"""BERT for masked-language-model and sentence-order pretraining."""
