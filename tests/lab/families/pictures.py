"""Picture for a tiny image-text model: pixel values, and the tokens that represent it in the prompt.

Every family takes pixels in a shape of its own, which its processor would make. No processor is needed here: all known
shapes are tried one after the other, and the model itself gives the number of tokens that a picture takes. The picture
has to matter: other pixels in the same shape must change the logits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["Picture", "find_picture"]

_IMAGE_TOKENS = ("image_token_id", "image_token_index", "image_patch_id", "im_patch_token_id", "image_pad_token_id")
_COUNTS = (
    "mm_tokens_per_image",
    "image_seq_length",
    "image_seq_len",
    "num_image_tokens",
    "num_query_tokens",
    "latent_query_num",
)
_MOST_TOKENS = 80
_ALONG = (
    "token_type_ids",
    "mm_token_type_ids",
    "moe_mm_token_type_ids",
    "image_embeds_position_mask",
    "image_attention_mask",
    "cross_attention_mask",
)


@dataclass(frozen=True)
class Picture:
    """Picture in the shape that a model takes.

    Attributes:
        arguments: arguments of the model's pass over the prompt, such as `pixel_values`.
        token: token that represents the picture in the prompt.
        count: number of these tokens.
        along: names of arguments as long as the prompt: they mark the tokens that represent a picture, or that see it.
        opening: the token before these, or `None`.
    """

    arguments: dict[str, torch.Tensor]
    token: int
    count: int
    along: tuple[str, ...] = ()
    opening: int | None = None

    def prompt(self, before: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
        """Return `before`, the picture's tokens and `after` as one prompt; each is `(1, n)`."""
        tokens = [self.token] * self.count if self.opening is None else [self.opening, *[self.token] * self.count]
        return torch.cat((before, before.new_tensor([tokens]), after), dim=1)

    def inputs(self, ids: torch.Tensor, mask: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        """Return the arguments of a call: ids `(B, n)` with the picture's tokens in some row, mask, and the picture.

        Args:
            ids: prompts, which hold the picture once.
            mask: attention mask of the prompts; by default nothing is masked.
        """
        mask = torch.ones_like(ids) if mask is None else mask
        is_picture = (ids == self.token).long()
        along = {}
        for name in self.along:
            if name == "image_attention_mask":
                along[name] = torch.ones(*ids.shape, 1, dtype=torch.long, device="cpu")
            elif name == "cross_attention_mask":
                tiles = self.arguments["aspect_ratio_mask"].shape[-1]
                along[name] = torch.ones(*ids.shape, 1, tiles, dtype=torch.long, device="cpu")
            else:
                along[name] = is_picture
        return {"input_ids": ids, "attention_mask": mask, **self.arguments, **along}


def find_picture(model: Any) -> Picture:
    """Find a random picture that the model takes, in the first shape that works.

    Args:
        model: an image-text model of a tiny config.

    Returns:
        The picture. The model's pass over it was run, and other pixels give other logits.

    Raises:
        ValueError: no known shape works; the message is the error of the last one.
    """
    config = model.config
    token = next((v for n in _IMAGE_TOKENS if isinstance(v := getattr(config, n, None), int)), None)
    takes = _taken(model)
    along = tuple(name for name in _ALONG if name in takes)
    if token is None:
        token = int(config.get_text_config().vocab_size) - 1  # if at all, an argument marks the picture
    before = torch.tensor([[5, 17, 29]], device="cpu")
    after = torch.tensor([[31, 8, 44]], device="cpu")
    said = "no shape of pixels is known for it"
    for arguments in _shapes(model):
        try:
            counts = _counts(model, arguments)
        except Exception as error:  # any error of a model's code for a shape that it does not take
            said = f"{type(error).__name__}: {error}"
            continue
        for count in counts:
            picture = Picture(arguments, token, count, along, getattr(config, "vision_start_token_id", None))
            ids = picture.prompt(before, after)
            pixels = {key: value.flip(-1) * 3.0 for key, value in arguments.items() if value.is_floating_point()}
            try:
                first, other = (_logits(model, picture.inputs(ids) | changed) for changed in ({}, pixels))
            except Exception as error:
                said = f"{type(error).__name__}: {error}"
                continue
            if first.isfinite().all() and not torch.equal(first, other):
                return picture
            said = "other pixels change nothing"
    raise ValueError(said)


def _logits(model: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the logits after the prompt, by the pass that `generate` makes over it."""
    output = model.generate(
        **inputs, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True, eos_token_id=None
    )
    return output.logits[0]  # type: ignore[no-any-return]


def _counts(model: Any, arguments: dict[str, torch.Tensor]) -> list[int]:
    """Return the numbers of tokens the picture may take: the model's own answer, or candidates from its config."""
    features = getattr(model, "get_image_features", None)
    if features is not None and not _takes_anything(features):
        wanted = inspect.signature(features).parameters
        with torch.no_grad():
            answer = features(
                **{name: value for name, value in arguments.items() if name in wanted or name == "image_merge_sizes"}
            )
        found = getattr(answer, "pooler_output", answer)
        if found is not None:
            return [_rows(found)]
    counts = []
    for config in (model.config, getattr(model.config, "vision_config", None)):
        counts += [count for name in _COUNTS if isinstance(count := getattr(config, name, None), int)]
    patches = _patches(next(value for value in arguments.values() if value.is_floating_point()), model)
    # The last is none at all: the picture precedes the text without tokens, or is seen by cross-attention.
    return [
        count
        for count in dict.fromkeys((*counts, patches, patches + 1, patches // 4, patches // 16, 0))
        if 0 <= count <= _MOST_TOKENS
    ]


def _taken(model: Any) -> set[str]:
    """Return the names of arguments that the model's pass takes, or the functions that it passes them on to."""
    functions = [type(model).forward]
    for owner in (model, getattr(model, "model", None)):
        functions += [f for f in (getattr(owner, "get_image_features", None), getattr(owner, "forward", None)) if f]
    return {name for function in functions for name in inspect.signature(function).parameters}


def _takes_anything(function: Callable[..., Any]) -> bool:
    return "args" in inspect.signature(function).parameters


def _rows(features: Any) -> int:
    """Return the number of vectors in the features of a picture, whatever their shape."""
    if isinstance(features, torch.Tensor):
        return features.numel() // features.shape[-1]
    return sum(map(_rows, features))


def _number(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, (list, tuple)) and value:
            value = value[0]
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return default


def _patches(pixels: torch.Tensor, model: Any) -> int:
    if pixels.ndim == 3:
        return pixels.shape[1]
    patch = _number(getattr(model.config, "vision_config", model.config), "patch_size", default=8)
    return pixels.shape[-1] * pixels.shape[-2] // patch**2


def _shapes(model: Any) -> Iterator[dict[str, torch.Tensor]]:
    """Yield pixel values, with the sizes and masks that belong to them, in every shape that some family takes."""
    config = model.config
    vision = next((v for n in ("vision_config", "vq_config") if (v := getattr(config, n, None)) is not None), config)
    takes = _taken(model)
    generator = torch.Generator(device="cpu").manual_seed(3)

    def pixels(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cpu")

    channels = _number(vision, "num_channels", "in_channels", "in_chans", default=3)
    patch = _number(vision, "patch_size", default=8)
    size = _number(vision, "image_size", default=4 * patch)
    if "image_grid_thw" in takes:
        merge = _number(vision, "spatial_merge_size", "merge_size", default=2)
        depth = _number(vision, "temporal_patch_size", default=1)
        side = 2 * merge
        for shape in (
            (side * side, channels * depth * patch**2),
            (side * side, channels, patch, patch),
            (side * side, channels, depth, patch, patch),
            (side * side, channels * patch**2),
            (side * side, 2 * channels * patch**2),
            (side * side // merge**2, merge * patch, merge * patch, channels),
        ):
            merges = {"image_merge_sizes": torch.tensor([merge], device="cpu")} if "image_merge_sizes" in takes else {}
            yield {
                "pixel_values": pixels(*shape),
                "image_grid_thw": torch.tensor([[1, side, side]], device="cpu"),
                **merges,
            }
    if "aspect_ratio_ids" in takes:
        tiles = _number(vision, "max_num_tiles", default=1)
        yield {
            "pixel_values": pixels(1, 1, tiles, channels, size, size),
            "aspect_ratio_ids": torch.tensor([[1]], device="cpu"),
            "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long, device="cpu"),
        }
    if "target_sizes" in takes:
        side = size // patch
        yield {
            "pixel_values": pixels(1, channels, patch, side * side * patch),
            "target_sizes": torch.tensor([[side, side]], device="cpu"),
        }
    asked = {"qformer_input_ids": torch.tensor([[5, 17, 29]], device="cpu")} if "qformer_input_ids" in takes else {}
    sizes = {"image_sizes": torch.tensor([[size, size]], device="cpu")} if "image_sizes" in takes else {}
    if "high_res_pixel_values" in takes:
        asked["high_res_pixel_values"] = pixels(1, channels, size, size)
    if "image_grid_hw" in takes:
        side = size // patch
        yield {
            "pixel_values": pixels(side * side, channels * patch**2),
            "image_grid_hw": torch.tensor([[side, side]], device="cpu"),
        }
    for more in ({}, sizes) if sizes else ({},):
        yield {"pixel_values": pixels(1, channels, size, size), **asked, **more}
        for tiles in (1, 2, 3, 5):
            yield {"pixel_values": pixels(1, tiles, channels, size, size), **asked, **more}
    if "pixel_attention_mask" in takes:
        yield {
            "pixel_values": pixels(1, 1, channels, size, size),
            "pixel_attention_mask": torch.ones(1, 1, device="cpu").bool(),
        }
    side = size // patch
    places = torch.stack(
        torch.meshgrid(torch.arange(side, device="cpu"), torch.arange(side, device="cpu"), indexing="ij"), dim=-1
    ).view(1, -1, 2)
    flat = pixels(1, side * side, channels * patch**2)
    if "image_position_ids" in takes:
        yield {"pixel_values": flat, "image_position_ids": places}
    if "spatial_shapes" in takes:
        yield {
            "pixel_values": flat,
            "spatial_shapes": torch.tensor([[side, side]], device="cpu"),
            "pixel_attention_mask": torch.ones(1, side * side, dtype=torch.long, device="cpu"),
        }
    if "flattened_patches" in takes:
        rows = torch.cat((places[0] + 1.0, flat[0]), dim=1)[None]
        yield {"flattened_patches": rows}
        return
    yield {"pixel_values": flat}
