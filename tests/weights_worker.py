"""Changes of a model's weights, between calls and in the middle of one, in a process that may crash."""

from __future__ import annotations

import copy
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import transformers as tf
from torch import nn
from torch.nn.utils import skip_init
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from ssd_generation import (
    Costs,
    DraftingConfig,
    LookupConfig,
    PrecisionConfig,
    SelfSpeculativeConfig,
    SkipConfig,
    enable_self_speculative,
)

WIDTH = 256  # large enough for a weight to have memory pages of its own, gone when it is freed
VOCAB = 320
NEW = 14
COSTS = Costs(plain_step=1.0, draft_step=0.2, verify=[(1, 1.0), (16, 1.1)])
FIXED = DraftingConfig(policy="fixed", max_draft_length=3)
DRAFTS = {
    "nothing": SelfSpeculativeConfig(costs=COSTS),
    "skip": SelfSpeculativeConfig(SkipConfig(attention=[1]), FIXED, costs=COSTS),
    "int8": SelfSpeculativeConfig(precision=PrecisionConfig(default="int8", head="int8"), drafting=FIXED, costs=COSTS),
    "lookup": SelfSpeculativeConfig(lookup=LookupConfig(min_ngram=1), drafting=FIXED, costs=COSTS),
}
REFUSED = "were changed in the middle of a call"


def new_model() -> Any:
    torch.manual_seed(5)
    sizes: dict[str, Any] = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    config = tf.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **sizes,
    )
    model = tf.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.normal_(std=0.08)  # large enough for texts not to repeat themselves
    return model


# --- changes: each does the same to two models, for the same seed ---


def layer_of(model: Any, chance: random.Random) -> nn.Linear:
    name, part = chance.choice(
        [("q_proj", "self_attn"), ("o_proj", "self_attn"), ("up_proj", "mlp"), ("down_proj", "mlp")]
    )
    found: nn.Linear = getattr(getattr(model.model.layers[chance.randrange(2)], part), name)
    return found


def replaced(model: Any, chance: random.Random) -> None:
    weight = layer_of(model, chance).weight
    weight.data = weight.data * chance.choice([1.0, 1.1])


def all_replaced(model: Any, chance: random.Random) -> None:
    for weight in model.parameters():
        weight.data = weight.data.clone()


def transposed(model: Any, chance: random.Random) -> None:
    weight = layer_of(model, chance).weight
    weight.data = weight.data.t()


def by_columns(model: Any, chance: random.Random) -> None:
    weight = layer_of(model, chance).weight
    weight.data = weight.data.t().contiguous().t()


def sliced(model: Any, chance: random.Random) -> None:
    model.lm_head.weight.data = model.lm_head.weight.data[: VOCAB - 16]


def expanded(model: Any, chance: random.Random) -> None:
    weight = layer_of(model, chance).weight
    weight.data = weight.data[:1].expand(weight.shape)


def doubled(model: Any, chance: random.Random) -> None:
    model.double()


def there_and_back(model: Any, chance: random.Random) -> None:
    model.bfloat16().float()


def in_place(model: Any, chance: random.Random) -> None:
    with torch.no_grad():
        layer_of(model, chance).weight.mul_(1.2)


def new_parameter(model: Any, chance: random.Random) -> None:
    layer = layer_of(model, chance)
    layer.weight = nn.Parameter(layer.weight.detach() * 0.9)


def new_layer(model: Any, chance: random.Random) -> None:
    layer, other = layer_of(model, chance), skip_init(nn.Linear, WIDTH, WIDTH, bias=False)
    other.weight = nn.Parameter(layer.weight.detach().roll(1, 0))
    for module in model.modules():
        for name, child in list(module.named_children()):
            if child is layer:
                setattr(module, name, other.eval())


def new_head(model: Any, chance: random.Random) -> None:
    head = skip_init(nn.Linear, WIDTH, VOCAB, bias=False).eval()
    head.weight = nn.Parameter(model.lm_head.weight.detach().roll(3, 0))
    model.lm_head = head


CHANGES: dict[str, Callable[[Any, random.Random], None]] = {
    "a weight by another": replaced,
    "all weights by copies": all_replaced,
    "transposed": transposed,
    "by columns": by_columns,
    "a head cut short": sliced,
    "expanded": expanded,
    "to float64": doubled,
    "to bfloat16 and back": there_and_back,
    "in place": in_place,
    "another parameter": new_parameter,
    "another layer": new_layer,
    "another head": new_head,
}
WHEN = ("between", "streamer", "criterion", "processor", "thread")


class Changes(BaseStreamer, StoppingCriteria, LogitsProcessor):  # type: ignore[misc]
    """Streamer, stopping criterion or logits processor that changes a model when it is called for the `at`-th time."""

    def __init__(self, change: Callable[[], None], at: int) -> None:
        self.change, self.left = change, at

    def _see(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.change()

    def put(self, value: Any) -> None:
        self._see()

    def end(self) -> None:
        pass

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self._see()
        return scores


class Criterion(Changes):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        self._see()
        return torch.zeros(len(input_ids), dtype=torch.bool)


def decoded(model: Any, request: Any, rows: int, sampled: bool, **users: Any) -> Any:
    torch.manual_seed(11)
    ids = torch.randint(3, VOCAB - 20, (rows, 8), generator=torch.Generator().manual_seed(2))
    try:
        return model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW,
            do_sample=sampled,
            **({"top_k": 0} if sampled else {}),
            self_speculative=request,
            **users,
        ).tolist()
    except Exception as error:  # the change may have made the model unable to run
        return f"{type(error).__name__}: {error}"


def with_change(model: Any, request: Any, seed: int, name: str, when: str, rows: int, sampled: bool) -> tuple[Any, Any]:
    """Return the text of the call during which, or before which, a model changes, and that of the next call."""
    chance = random.Random(seed)
    at = chance.randrange(2, 9)
    changer = (Criterion if when == "criterion" else Changes)(lambda: CHANGES[name](model, chance), at)
    users: dict[str, Any] = {
        "streamer": {"streamer": changer},
        "criterion": {"stopping_criteria": StoppingCriteriaList([changer])},
        "processor": {"logits_processor": LogitsProcessorList([changer])},
    }.get(when, {})
    if when == "between":
        decoded(model, request, rows, sampled)
        CHANGES[name](model, chance)
    first = decoded(model, request, rows, sampled, **users)
    return first, decoded(model, request, rows, sampled)


def drawn(seed: int) -> dict[str, Any]:
    """Return the change that a seed draws, when it is made, and the calls around it."""
    chance = random.Random(seed)
    name, when, draft = chance.choice(list(CHANGES)), chance.choice(WHEN), chance.choice(list(DRAFTS))
    sampled, rows = chance.random() < 0.3, 1 if when == "streamer" else chance.choice([1, 1, 3])
    return {"seed": seed, "change": name, "when": when, "draft": draft, "sampled": sampled, "rows": rows}


def change(saying: Any, seed: int) -> dict[str, Any]:
    """Make a random change to a model that drafts and to one that does not; return the texts of both."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    about = drawn(seed)
    _, name, when, draft, sampled, rows = about.values()
    ours = enable_self_speculative(new_model())
    plain = copy.deepcopy(ours)
    if when == "thread":
        return about | {"texts": in_a_thread(ours, DRAFTS[draft], seed, name, rows, sampled)}
    expected = with_change(plain, None, seed, name, when, rows, sampled)
    got = with_change(ours, DRAFTS[draft], seed, name, when, rows, sampled)
    return about | {"plain": expected, "ours": got}


def in_a_thread(model: Any, request: Any, seed: int, name: str, rows: int, sampled: bool) -> str:
    """Generate texts while another thread keeps changing weights: any text will do if the process survives."""
    over = threading.Event()
    chance = random.Random(seed)

    def disturb() -> None:
        while not over.is_set():
            for _ in range(3):
                CHANGES[name](model, chance)

    thread = threading.Thread(target=disturb)
    decoded(model, request, rows, sampled)
    thread.start()
    try:
        for _ in range(4):
            decoded(model, request, rows, sampled)
    finally:
        over.set()
        thread.join()
    return "alive"
