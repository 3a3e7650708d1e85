"""Load the weights of a model folder into our modules, tensor by tensor, by name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shared.default_model import DEFAULT_MODEL, resolve
from shared.errors import ModelLoadError

if TYPE_CHECKING:  # torch takes seconds to import, and finding a folder does not need it
    import torch

    from shared.model import Transformer

Part = Callable[[str, tuple[int, ...]], tuple[slice, ...]]


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a model folder."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read {file}: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"cannot read {file}: it holds a {type(content).__name__}, not an object")
    return content


def read_config(path: str | Path) -> dict[str, Any]:
    """The config.json of a model folder."""
    return read_json(Path(path) / "config.json")


def weight_files(path: Path) -> list[Path]:
    """One model.safetensors, or the parts that an index lists."""
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    index = read_json(path / "model.safetensors.index.json")
    names = sorted(set(index.get("weight_map", {}).values()))
    if not names:
        raise ModelLoadError(f"{path / 'model.safetensors.index.json'}: weight_map lists no file")
    return [path / name for name in names]


def whole(name: str, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The part of a tensor to read: all of it. Tensor parallelism passes another function."""
    return tuple(slice(0, size) for size in shape)


def read_tensor(file: Any, name: str, part: Part) -> torch.Tensor:
    """Read one tensor, or a part of it, from an open safetensors file; the rest stays on disk."""
    stored = file.get_slice(name)
    return stored[part(name, tuple(stored.get_shape()))]


def load_weights(model: Transformer, path: str | Path, dtype: torch.dtype, device: str | torch.device,
                 part: Part = whole) -> None:
    """Fill every parameter of the model; raises ModelLoadError naming the tensor that is wrong."""
    from safetensors import SafetensorError, safe_open

    wanted = dict(model.named_parameters())  # a tied lm_head appears once, as embed_tokens
    tied = model.lm_head.weight is model.embed_tokens.weight
    for path_of_file in weight_files(Path(path)):
        try:
            with safe_open(path_of_file, framework="pt") as file:
                for stored_name in file.keys():
                    name = stored_name.removeprefix("model.")
                    if not is_derived(name, tied):
                        place(model, wanted, name, read_tensor(file, stored_name, part), dtype, device)
        except (OSError, SafetensorError) as error:
            raise ModelLoadError(f"cannot read {path_of_file}: {error}; fetch the file again") from error
    if wanted:
        raise ModelLoadError(f"{path} lacks {len(wanted)} tensors that the model needs: {listing(wanted)}")
    if tied:
        model.lm_head.weight = model.embed_tokens.weight


def is_derived(name: str, tied: bool) -> bool:
    """Tensors that some files carry and nobody needs: rotary tables, and a copy of tied embeddings."""
    return name.endswith("rotary_emb.inv_freq") or (tied and name == "lm_head.weight")


def place(model: Transformer, wanted: dict[str, torch.nn.Parameter], name: str, tensor: torch.Tensor,
          dtype: torch.dtype, device: str | torch.device) -> None:
    """Put one tensor where its name says, and take the name off the list of those still wanted."""
    from torch.nn import Parameter

    if name not in wanted:
        raise ModelLoadError(f"unexpected tensor {name} {list(tensor.shape)}: the model has no such place")
    expected = list(wanted.pop(name).shape)
    if list(tensor.shape) != expected:
        raise ModelLoadError(f"tensor {name} has shape {list(tensor.shape)}, the model needs {expected}")
    owner, _, attribute = name.rpartition(".")
    value = tensor.to(device=device, dtype=dtype, copy=True)  # a copy: the file's own memory can go
    setattr(model.get_submodule(owner), attribute, Parameter(value, requires_grad=False))


def listing(names: Iterable[str]) -> str:
    """The first few names, for a message."""
    names = sorted(names)
    return ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")


def load_model(
    name: str | Path = DEFAULT_MODEL, dtype: torch.dtype | None = None, device: str | torch.device = "cpu"
) -> Transformer:
    """A model ready to run: resolve, read config.json, allocate, load. dtype None means float32."""
    import torch

    from shared.model import ModelConfig, Transformer

    path = resolve(name)
    try:
        config = ModelConfig.from_dict(read_config(path))
    except KeyError as error:
        raise ModelLoadError(f"{path / 'config.json'} lacks {error}") from error
    with torch.device("meta"):  # shapes without memory; each tensor gets its memory when it is read
        model = Transformer(config)
    load_weights(model, path, dtype or torch.float32, device)
    return model.eval().requires_grad_(False)
