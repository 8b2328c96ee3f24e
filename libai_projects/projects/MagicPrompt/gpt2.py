"""The name under which the config.yaml of earlier runs has the model."""

from libai_projects.models.gpt2.model import GPT2ForPreTraining

__all__ = ["GPT2ForPreTraining"]
