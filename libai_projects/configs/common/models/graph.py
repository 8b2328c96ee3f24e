"""nn.Graph for training and evaluation."""

from libai.config import LazyCall
from libai.models.utils import GraphBase

graph = {
    "enabled": True,
    # -1: silent; 0 to 3: what nn.Graph prints while it is built.
    "debug": -1,
    "train_graph": LazyCall(GraphBase)(is_train=True),
    "eval_graph": LazyCall(GraphBase)(is_train=False),
}
