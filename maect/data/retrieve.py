"""Fetches public files on a machine with internet: resumable, checked, never half there.

The catalogue says where each is, under which name and with which sha256: where the maintainers of
this file have hashed the content; elsewhere the first download's hash is kept beside the file.
ImageNet-1k itself needs an account and is not here.

By hand, because the common libraries lose what gigabytes over a bad line need: pooch, for one, has
checksums and unpacking, but starts a broken download over and takes a cut one for complete.
"""

import errno
import http.client
import shutil
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from maect.core.errors import UserError, did_you_mean
from maect.core.files import fsync_path, sha256_file, write_text
from maect.recipes.few_labels import OFFICIAL

_ATTEMPTS = 5
_TIMEOUT = 60
_PIECE = 1 << 20
# No name service or no route: waiting will not help.
_HOPELESS = ("Name or service", "name resolution", "unreachable", "refused")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)

_MSN = "https://raw.githubusercontent.com/facebookresearch/msn/main"
_SIMCLR = "https://raw.githubusercontent.com/google-research/simclr/master/imagenet_subsets"
_V2 = "https://huggingface.co/datasets/vaishaal/ImageNetV2/resolve/main"
_SKETCH = "https://huggingface.co/datasets/songweig/imagenet_sketch/resolve/main/data"
_REAL = "https://raw.githubusercontent.com/google-research/reassessed-imagenet/master"
_BERKELEY = "https://people.eecs.berkeley.edu/~hendrycks"
_META = "https://dl.fbaipublicfiles.com"
_HUB = "https://huggingface.co/timm"
_JKU = "https://ml.jku.at/research/maect/download"
_DROPBOX = "https://www.dropbox.com/sh"
_IBOT = "https://lf3-nlp-opensource.bytetos.com/obj/nlp-opensource/archive/2022/ibot"


@dataclass(frozen=True)
class Remote:
    """One file: its address, its name here, its hash if known, the folder it unpacks to."""

    url: str
    name: str
    sha256: str | None = None
    unpacks_to: str | None = None


# The third 5-shot list is called 3imgs_class.txt at its source; it holds five names per class.
_LISTS = {
    "simclr_1percent.txt": f"{_SIMCLR}/1percent.txt",
    "simclr_10percent.txt": f"{_SIMCLR}/10percent.txt",
    "msn_1shot_split1.txt": f"{_MSN}/imagenet_subsets1/1imgs_class.txt",
    "msn_1shot_split2.txt": f"{_MSN}/imagenet_subsets2/1imgs_class.txt",
    "msn_1shot_split3.txt": f"{_MSN}/imagenet_subsets3/1imgs_class.txt",
    "msn_2shot_split1.txt": f"{_MSN}/imagenet_subsets1/2imgs_class.txt",
    "msn_2shot_split2.txt": f"{_MSN}/imagenet_subsets2/2imgs_class.txt",
    "msn_2shot_split3.txt": f"{_MSN}/imagenet_subsets3/2imgs_class.txt",
    "msn_5shot_split1.txt": f"{_MSN}/imagenet_subsets1/5imgs_class.txt",
    "msn_5shot_split2.txt": f"{_MSN}/imagenet_subsets2/5imgs_class.txt",
    "msn_5shot_split3.txt": f"{_MSN}/imagenet_subsets3/3imgs_class.txt",
}


def _archive(url: str, folder: str) -> tuple[Remote, ...]:
    return (Remote(url, url.rpartition("/")[2], unpacks_to=folder),)


def _weights(url: str, name: str | None = None) -> tuple[Remote, ...]:
    return (Remote(url, name or url.rpartition("/")[2]),)


CATALOGUE: dict[str, tuple[Remote, ...]] = {
    "low_shot_lists": tuple(Remote(url, name, OFFICIAL[name]) for name, url in _LISTS.items()),
    # The hash is of its newest commit, bcd006f.
    "imagenet_real": (
        Remote(
            f"{_REAL}/real.json",
            "real.json",
            "d83e9bff374c631aae8439eb064c7019acc56e1b3bc3f56b8380c2a710b0220b",
        ),
    ),
    "imagenet_v2_matched_frequency": _archive(
        f"{_V2}/imagenetv2-matched-frequency.tar.gz", "imagenetv2-matched-frequency-format-val"
    ),
    "imagenet_v2_threshold": _archive(
        f"{_V2}/imagenetv2-threshold0.7.tar.gz", "imagenetv2-threshold0.7-format-val"
    ),
    "imagenet_v2_top_images": _archive(
        f"{_V2}/imagenetv2-top-images.tar.gz", "imagenetv2-top-images-format-val"
    ),
    "imagenet_r": _archive(f"{_BERKELEY}/imagenet-r.tar", "imagenet-r"),
    "imagenet_a": _archive(f"{_BERKELEY}/imagenet-a.tar", "imagenet-a"),
    "imagenet_sketch": _archive(f"{_SKETCH}/ImageNet-Sketch.zip", "sketch"),
    "mae_base": _weights(f"{_META}/mae/pretrain/mae_pretrain_vit_base.pth"),
    "mae_large": _weights(f"{_META}/mae/pretrain/mae_pretrain_vit_large.pth"),
    "mae_huge14": _weights(f"{_META}/mae/pretrain/mae_pretrain_vit_huge.pth"),
    "mae_base_full": _weights(f"{_META}/mae/pretrain/mae_pretrain_vit_base_full.pth"),
    "mae_large_full": _weights(f"{_META}/mae/pretrain/mae_pretrain_vit_large_full.pth"),
    "mae_huge14_full": _weights(f"{_META}/mae/pretrain/mae_pretrain_vit_huge_full.pth"),
    "moco_v3_base": _weights(f"{_META}/moco-v3/vit-b-300ep/linear-vit-b-300ep.pth.tar"),
    "moco_v3_base_full": _weights(f"{_META}/moco-v3/vit-b-300ep/vit-b-300ep.pth.tar"),
    "msn_base": _weights(f"{_META}/msn/vitb16_600ep.pth.tar"),
    "msn_large": _weights(f"{_META}/msn/vitl16_600ep.pth.tar"),
    "dino_base": _weights(f"{_META}/dino/dino_vitbase16_pretrain/dino_vitbase16_pretrain.pth"),
    "dino_small": _weights(
        f"{_META}/dino/dino_deitsmall16_pretrain/dino_deitsmall16_pretrain.pth"
    ),
    **{
        f"dinov2_{size}{more}": _weights(
            f"{_META}/dinov2/dinov2_{short}/dinov2_{short}{end}_pretrain.pth"
        )
        for size, short in (("small", "vits14"), ("base", "vitb14"), ("large", "vitl14"))
        for more, end in (("", ""), ("_registers", "_reg4"))
    },
    **{
        name: _weights(f"{_HUB}/{model}/resolve/main/model.safetensors", f"{name}.safetensors")
        for name, model in {
            "dinov3_small": "vit_small_patch16_dinov3.lvd1689m",
            "dinov3_base": "vit_base_patch16_dinov3.lvd1689m",
            "dinov3_large": "vit_large_patch16_dinov3.lvd1689m",
            "siglip2_base": "vit_base_patch16_siglip_224.v2_webli",
            "siglip2_large": "vit_large_patch16_siglip_256.v2_webli",
            "clip_base": "vit_base_patch16_clip_quickgelu_224.openai",
        }.items()
    },
    "ibot_base": _weights(f"{_IBOT}/vitb_16/checkpoint_teacher.pth", "ibot_vitb16_teacher.pth"),
    "ibot_large": _weights(f"{_IBOT}/vitl_16/checkpoint_teacher.pth", "ibot_vitl16_teacher.pth"),
    "ibot_base_rand_mask": _weights(
        f"{_IBOT}/vitb_16_rand_mask/checkpoint_teacher.pth", "ibot_vitb16_rand_mask_teacher.pth"
    ),
    "ibot_large_rand_mask": _weights(
        f"{_IBOT}/vitl_16_rand_mask/checkpoint_teacher.pth", "ibot_vitl16_rand_mask_teacher.pth"
    ),
    "layer_grafting_base": _weights(
        f"{_DROPBOX}/e9czo0xtivdqvff/AAC730kZx8Bj6pEIhFswpvVla/checkpoint_final.pth.tar?dl=1",
        "layer_grafting_base.pth.tar",
    ),
    "layer_grafting_large": _weights(
        f"{_DROPBOX}/fk92wphgu8fq772/AABklx8vjQmDZgz8vg6BbTPWa/checkpoint_final.pth.tar?dl=1",
        "layer_grafting_large.pth.tar",
    ),
    "ijepa_huge14": _weights(f"{_META}/ijepa/IN1K-vit.h.14-300e.pth.tar"),
    "ijepa_huge16_448": _weights(f"{_META}/ijepa/IN1K-vit.h.16-448px-300e.pth.tar"),
} | {
    f"{name}_{size}": _weights(f"{_JKU}/{name}_{size}.th")
    for name, sizes in {
        "mae_reimpl": ("base16", "large16", "huge16"),
        "maect": ("base16", "large16", "huge16", "huge14"),
        "maectaug": ("base16", "large16", "huge16", "huge14"),
    }.items()
    for size in sizes
}  # fmt: skip


def retrieve(what: str, out: Path) -> list[Path]:
    """Fetch everything of a name in the catalogue; what is there already is only checked.

    Args:
        what: a name in `CATALOGUE`.
        out: folder for the files, made if needed.

    Returns:
        The files, or the folders that archives were unpacked to.

    Raises:
        UserError: unknown name, no connection, or a checksum that differs.
    """
    if what not in CATALOGUE:
        hint = did_you_mean(what, CATALOGUE)
        raise UserError(f"nothing known as {what!r} to retrieve; {hint}")
    return fetch_all(CATALOGUE[what], Path(out))


def fetch_all(remotes: Iterable[Remote], out: Path, wait: float = 2.0) -> list[Path]:
    """Fetch and unpack files; `wait` seconds before a second attempt, doubling."""
    out.mkdir(parents=True, exist_ok=True)
    fetched = []
    for remote in remotes:
        if remote.unpacks_to is not None and (out / remote.unpacks_to).is_dir():
            fetched.append(out / remote.unpacks_to)
            continue
        path = out / remote.name
        if not path.exists():
            _download(remote, path, wait)
        _check(remote, path)
        fetched.append(path if not remote.unpacks_to else _unpack(path, out / remote.unpacks_to))
    return fetched


def _download(remote: Remote, path: Path, wait: float) -> None:
    part = path.with_name(f"{path.name}.part")
    failures = 0
    while True:
        before = _size(part)
        try:
            _append(remote.url, part)
            break
        except urllib.error.HTTPError as error:
            reason = f"HTTP {error.code}"
            hopeless = error.code < 500 and error.code != 429
        except (OSError, http.client.HTTPException) as error:
            if isinstance(error, OSError) and error.errno in _FULL:
                raise UserError(f"{part}: {error.strerror}; make room and try again") from None
            reason = str(getattr(error, "reason", error)) or type(error).__name__
            hopeless = any(word in reason for word in _HOPELESS)
        failures = 0 if _size(part) > before else failures + 1
        if hopeless or failures == _ATTEMPTS:
            raise UserError(_by_hand(remote, path, reason))
        time.sleep(wait * 2 ** max(failures - 1, 0))
    # A wrong file must not be taken for a part to resume from.
    if remote.sha256 is not None and sha256_file(part) != remote.sha256:
        part.unlink()
        _tag(part).unlink(missing_ok=True)
        raise UserError(
            f"{remote.url}: sha256 differs from the expected {remote.sha256}; the download was "
            "deleted. Try again; if it stays, the file has changed at its source"
        )
    fsync_path(part)
    part.rename(path)
    _tag(part).unlink(missing_ok=True)


def _append(url: str, part: Path) -> None:
    """Continue a download where it stopped, unless the source has changed since."""
    start = _size(part)
    headers = {"User-Agent": "maect"}
    if start and _tag(part).exists():
        headers |= {"Range": f"bytes={start}-", "If-Range": _tag(part).read_text().strip()}
    else:
        start = 0
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT)
    except urllib.error.HTTPError as error:
        if error.code != 416:  # asked for bytes behind the end: start over
            raise
        part.unlink(missing_ok=True)
        response = urllib.request.urlopen(
            urllib.request.Request(url, headers={"User-Agent": "maect"}), timeout=_TIMEOUT
        )
    with response:
        resumed = response.status == 206
        length = response.headers.get("Content-Length")
        tag = response.headers.get("ETag") or response.headers.get("Last-Modified")
        if tag and not tag.startswith("W/"):  # a weak tag cannot vouch for a range
            _tag(part).write_text(tag)
        else:
            _tag(part).unlink(missing_ok=True)
        received = 0
        with open(part, "ab" if resumed else "wb") as file:
            while piece := response.read(_PIECE):
                file.write(piece)
                received += len(piece)
    if length is not None and received != int(length):
        raise ConnectionError(f"connection closed after {received} of {length} bytes")


def _check(remote: Remote, path: Path) -> None:
    """Compare with the known hash, or with the one seen at first."""
    seen = path.with_name(f"{path.name}.sha256")
    actual = sha256_file(path)
    expected = remote.sha256
    if expected is None and seen.exists():
        expected = seen.read_text(encoding="utf-8").split()[0]
    if expected is not None and actual != expected:
        raise UserError(f"{path}: sha256 is {actual}, expected {expected}; delete it and try again")
    if not seen.exists():
        write_text(seen, f"{actual}  {path.name}\n")


def _unpack(archive: Path, folder: Path) -> Path:
    """Unpack beside the archive, under a temporary name until it is complete.

    Only files and folders: without links, names that are checked cannot lead elsewhere.
    """
    temporary = Path(tempfile.mkdtemp(prefix=".unpack-", dir=folder.parent))
    try:
        if zipfile.is_zipfile(archive):
            with zipfile.ZipFile(archive) as zipped:
                zipped.extractall(temporary)
        else:
            with tarfile.open(archive) as tar:
                for member in tar:
                    if not (member.isfile() or member.isdir()) or member.size < 0:
                        raise tarfile.TarError(f"{member.name!r} is neither file nor folder")
                    tar.extract(member, temporary, filter="data")
        if not (temporary / folder.name).is_dir():
            raise UserError(f"{archive}: holds no folder {folder.name}")
        (temporary / folder.name).rename(folder)
    except OSError as error:
        fault = f"{archive}: cannot be unpacked ({error.strerror or error})"
        raise UserError(
            f"{fault}; make room and try again"
            if error.errno in _FULL
            else f"{fault}; delete it and try again"
        ) from None
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, ValueError) as error:
        raise UserError(
            f"{archive}: cannot be unpacked ({error}); delete it and try again"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return folder


def _by_hand(remote: Remote, path: Path, reason: str) -> str:
    return (
        f"cannot fetch {remote.url}: {reason}. On a machine with internet run "
        f"`curl -L -o {path.name} {remote.url}`, put the file at {path.resolve()} and try again"
    )


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _tag(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")
