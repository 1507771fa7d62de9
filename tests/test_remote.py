"""Checkpoints in buckets, on fsspec's memory filesystem."""
import fsspec
import numpy
import pytest

from tests.conftest import ROOT, make_config
from wan_torchax.config.schema import ConfigError
from wan_torchax.runtime import checkpoint, formats, reading, remote

DEMO = ROOT / "models/demo"


@pytest.fixture
def bucket(tmp_path, monkeypatch):
    """The demo model in a bucket, and how many bytes of it have been asked for."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    files = fsspec.filesystem("memory")
    for path in DEMO.rglob("*.*"):
        if path.is_file():
            files.pipe_file(f"memory://bucket/demo/{path.relative_to(DEMO)}", path.read_bytes())
    fetched = []
    plain = type(files).cat_file

    def count(self, path, start=None, end=None, **options):
        content = plain(self, path, start, end, **options)
        fetched.append((path, len(content)))
        return content

    monkeypatch.setattr(type(files), "cat_file", count)
    yield fetched
    files.rm("memory://bucket", recursive=True)


def model():
    return make_config("model.path=memory://bucket/demo")


def total(fetched):
    return sum(count for path, count in fetched if path.endswith(".safetensors"))


def test_a_checkpoint_in_a_bucket_is_found_without_its_weights(bucket):
    found = checkpoint.find(model(), "text_encoder")
    assert (found.path.parent / "tokenizer/tokenizer.json").exists()
    local = checkpoint.find(make_config(), "text_encoder")
    assert found.architecture == local.architecture and found.fingerprint != local.fingerprint
    assert total(bucket) < 100_000 < (found.path / "model.safetensors").stat().st_size
    again = checkpoint.find(model(), "text_encoder")
    assert again == found


def read_rows(stored, first, last):
    rows = numpy.empty((last - first, *stored.shape[1:]), "float32")
    with stored.file.open("rb") as file:
        reading.read_rows(file.fileno(), stored, first, rows)
    return rows


def test_rows_are_those_of_the_file_and_are_fetched_once(bucket):
    folder = checkpoint.find(model(), "transformer").path
    name, stored = max(checkpoint.index(folder).items(), key=lambda item: numpy.prod(item[1].shape))
    before = total(bucket)
    rows, width = read_rows(stored, 1, 3), formats.row_bytes(stored)
    numpy.testing.assert_array_equal(rows, read_rows(checkpoint.index(DEMO / "transformer")[name], 1, 3))
    assert total(bucket) - before == 2 * width, "only those rows"
    read_rows(stored, 1, 2)
    assert total(bucket) - before == 2 * width, "once"
    read_rows(stored, 0, 2)
    assert remote.read_ranges(stored.file) == [[stored.offset, stored.offset + 3 * width]]


def test_other_files_in_the_bucket_are_noticed(bucket):
    before = checkpoint.find(model(), "vae")
    header = checkpoint.index(before.path)
    stored = next(iter(header.values()))
    remote.fill(stored.file, stored.offset, 4)
    files = fsspec.filesystem("memory")
    content = bytearray(files.cat_file("memory://bucket/demo/vae/diffusion_pytorch_model.safetensors"))
    content[-1] ^= 1
    files.pipe_file("memory://bucket/demo/vae/diffusion_pytorch_model.safetensors", bytes(content))
    after = checkpoint.find(model(), "vae")
    assert after.fingerprint != before.fingerprint and remote.read_ranges(stored.file) == []


def test_what_cannot_be_read_is_told(bucket):
    with pytest.raises(ConfigError, match="no folder vae/"):
        checkpoint.find(make_config("model.path=memory://bucket/nothing"), "vae")
    with pytest.raises(ConfigError, match="use gs:// or s3://"):
        remote.connect("nowhere://bucket/demo")


@pytest.mark.parametrize("scheme, package", [("gs", "gcsfs"), ("s3", "s3fs")])
def test_a_missing_package_is_named(scheme, package, monkeypatch):
    def missing(name):
        raise ImportError(f"Please install {package}")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        remote.connect(f"{scheme}://bucket/demo")


def test_ranges_are_joined():
    assert remote.joined([[4, 6], [0, 2], [2, 3], [5, 9]]) == [[0, 3], [4, 9]]
