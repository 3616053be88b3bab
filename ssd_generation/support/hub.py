"""One file of a given name, in a folder or in a repository of the Hub: finding, writing and uploading it."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path, PureWindowsPath
from typing import TYPE_CHECKING, Any

from .display import path_shown
from .files import write_whole
from .messages import clipped, did_you_mean, listed, shown

if TYPE_CHECKING:
    from huggingface_hub import CommitInfo

__all__ = ["HUB_KEYWORDS", "identity_of", "locate", "upload", "write_into"]

HUB_KEYWORDS = (
    *("cache_dir", "endpoint", "etag_timeout", "force_download", "headers", "local_dir", "local_files_only"),
    *("subfolder", "token", "user_agent"),
)
"""Keywords that `locate` passes on to `huggingface_hub.hf_hub_download`."""


def locate(
    pretrained: str | os.PathLike[str],
    name: str,
    revision: str | None,
    keywords: Mapping[str, Any],
    presets: Collection[str] = (),
) -> str | None:
    """Return the path of the file that the arguments of a `from_pretrained` refer to.

    Files on disk come first, then the presets, then the Hub, which is not queried for anything that looks like a path.

    Args:
        pretrained: the file, a folder that holds it, a preset's name or a Hub id.
        name: name of the file in a folder or a repository.
        revision: branch, tag or commit on the Hub; None for the main one.
        keywords: some of `HUB_KEYWORDS`; `subfolder` works for a local folder too.
        presets: names of presets, which are not looked for on the Hub.

    Returns:
        The path; None where a preset is meant.

    Raises:
        TypeError: neither a string nor a path, or an unknown keyword, which is never ignored.
        FileNotFoundError: no such file or folder, no such file in the folder, or none that the Hub could give.
        ValueError: the folder cannot be read.
    """
    allowed = ("name", "revision", *HUB_KEYWORDS)
    for key in keywords:
        if key not in HUB_KEYWORDS:
            problem = f"from_pretrained got an unknown keyword {shown(key)}; allowed are {', '.join(allowed)}."
            raise TypeError(f"{problem}{did_you_mean(key, allowed)}")
    if not isinstance(pretrained, (str, os.PathLike)) or not isinstance(os.fspath(pretrained), str):
        raise TypeError(
            f"from_pretrained takes a folder, a JSON file or a Hub id, but got {shown(pretrained)}. To read a dict, "
            "use from_dict."
        )
    given = os.fspath(pretrained)
    path = os.path.expanduser(given)
    if os.path.isdir(path):
        return _file_in(os.path.join(path, keywords.get("subfolder") or ""), name)
    if os.path.exists(path):
        return path
    if isinstance(pretrained, str) and given in presets:
        return None
    if not isinstance(pretrained, str) or not given or _looks_like_path(given):
        raise FileNotFoundError(
            f"There is no file or folder {path_shown(given)}. Give a folder that holds {name}, a JSON file, or a Hub "
            "id such as 'user/repo'."
        )
    return _download(given, name, revision, keywords, presets)


def _file_in(folder: str, name: str) -> str:
    path = os.path.join(folder, name)
    if os.path.exists(path):
        return path
    if not os.path.isdir(folder):
        raise FileNotFoundError(f"There is no folder {path_shown(folder)}. Check `subfolder`.")
    try:
        others = sorted(entry for entry in os.listdir(folder) if entry.endswith(".json"))
    except OSError as error:
        raise ValueError(f"The folder {path_shown(folder)} cannot be read: {error.strerror}.") from error
    found = f"; its JSON files are {listed(others)}" if others else ""
    raise FileNotFoundError(
        f"The folder {path_shown(folder)} holds no {name}{found}. Give the path of the JSON file itself, or write one "
        "there with save_pretrained."
    )


def _download(
    repo_id: str, name: str, revision: str | None, keywords: Mapping[str, Any], presets: Collection[str]
) -> str:
    import huggingface_hub
    from huggingface_hub import errors

    try:
        return str(huggingface_hub.hf_hub_download(repo_id, name, revision=revision, **keywords))
    except (
        errors.EntryNotFoundError,  # its subclass LocalEntryNotFoundError: the Hub cannot be reached
        errors.HFValidationError,
        errors.HfHubHTTPError,
        errors.OfflineModeIsEnabled,
        OSError,  # the cache's folder
    ) as error:
        reason = clipped((str(error).strip().splitlines() or [type(error).__name__])[0], most=150)
        at = f" (revision {shown(revision)})" if revision is not None else ""
        raise FileNotFoundError(
            f"Found no config {shown(repo_id)}: there is no folder and no JSON file of that name here, it is not a "
            f"preset ({', '.join(presets)}), and as a Hub id{at} it gave no {name}: {reason} Check the spelling; for "
            f"the Hub, "
            "also the connection and, if the repository is private or gated, `token`."
        ) from error


def write_into(folder: str | os.PathLike[str], name: str, text: str, what: str) -> Path:
    """Write a file of text into a folder, whole or not at all.

        folder: the folder; created if it does not exist.
        name: name of the file.
        text: its content.
        what: name of the file in errors, such as "The config".

    Returns:
        The path of the file.

    Raises:
        ValueError: the folder is a file, or cannot be written to.
    """
    target = Path(os.path.expanduser(os.fspath(folder)))
    if str(target).startswith("~"):
        raise ValueError(
            f"{path_shown(target)} begins with the home folder of an unknown user. Give the absolute path, or "
            "put './' in front of a folder of that name."
        )
    if os.path.exists(target) and not os.path.isdir(target):
        raise ValueError(f"{what} needs a folder, but {path_shown(target)} is a file. Give the folder it lies in.")
    try:
        target.mkdir(parents=True, exist_ok=True)
        write_whole(target / name, text)
    except (OSError, ValueError) as error:  # ValueError: a null byte
        reason = clipped(getattr(error, "strerror", None) or error)
        raise ValueError(
            f"{what} cannot be written into {path_shown(target)}: {reason}. Give another folder."
        ) from error
    return target / name


def upload(
    text: str, name: str, repo_id: str, private: bool | None, token: str | bool | None, **keywords: Any
) -> CommitInfo:
    """Upload a file to a model repository, which is created if it does not exist.

    Args:
        text: content of the file.
        name: name of the file.
        repo_id: repository, such as "user/repo".
        private: whether a new repository is private; None for the account's default.
        token: token of the Hub; None for that of `hf auth login`.
        **keywords: keywords of `huggingface_hub.HfApi.upload_file`.
    """
    import huggingface_hub

    api = huggingface_hub.HfApi(token=token)
    repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
    done: CommitInfo = api.upload_file(path_or_fileobj=text.encode(), path_in_repo=name, repo_id=repo_id, **keywords)
    return done


def identity_of(name_or_path: str) -> tuple[str | None, str | None]:
    """Return the name of a model that was loaded from somewhere, without the folders above it.

    Args:
        name_or_path: argument of a `from_pretrained`.

    Returns:
        Hub id, or the name of the folder; and the revision, where the path contains it (the Hub's cache).
    """
    parts = PureWindowsPath(name_or_path).parts  # splits at both kinds of slash
    for position, part in enumerate(parts):
        if part.startswith("models--"):  # …/models--org--name/snapshots/<commit>
            hub_id = "/".join(part.removeprefix("models--").split("--", 1))
            below = parts[position + 1 :]
            return hub_id, below[1] if len(below) > 1 and below[0] == "snapshots" else None
    if _looks_like_path(name_or_path) or os.path.isdir(name_or_path):
        name = os.path.basename(os.path.abspath(os.path.expanduser(name_or_path.replace("\\", "/"))))
        # Names in the file system need not be UTF-8; the root has no name.
        return name.encode("utf-8", errors="replace").decode() or None, None
    return name_or_path or None, None


def _looks_like_path(text: str) -> bool:
    """Tell whether a string cannot be meant as a Hub id ("name" or "user/name")."""
    return (
        text.endswith((".json", "/"))
        or text.startswith((".", "/", "~"))
        or "\\" in text
        or text.count("/") > 1
        or bool(PureWindowsPath(text).drive)
    )
