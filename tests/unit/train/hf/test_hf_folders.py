"""`cs336 import` and `cs336 export --format hf` against transformers itself: weights to the bit, the same logits."""

import dataclasses
import errno
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from cs336_systems.cli import main
from cs336_systems.config import ModelConfig
from cs336_systems.flags import build
from cs336_systems.model import TransformerLM
from cs336_systems.parallel.launch import process_group
from cs336_systems.train.hf import hf_folders
from cs336_systems.train.hf.hf_config import config_of, model_of
from cs336_systems.train.settings import TrainSettings
from cs336_systems.train.tokens.token_store import read_store
from cs336_systems.train.weights import load_weights
from tests.helpers import assert_refused, clean_env, execute, files
from tests.unit.train.hf.test_hf_config import SHAPE
from tests.unit.train.stores_by_hand import write_store

pytestmark = pytest.mark.usefixtures("elsewhere")

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 16}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-tied": ("Llama", {"tie_word_embeddings": True}),
    "qwen2": ("Qwen2", {"rms_norm_eps": 1e-6}),
    "qwen2-tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}),
    "qwen3-tied": ("Qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
}


def published(name: str, folder: Path, dtype: torch.dtype = torch.float32, **saved: Any) -> Any:
    """A tiny random model of transformers, saved in a folder; norms and biases are random, too."""
    transformers = pytest.importorskip("transformers")
    family, fields = CASES[name]
    config = getattr(transformers, f"{family}Config")(**{**SHAPE, **fields})
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape) * 0.3)
    model.save_pretrained(folder, **saved)
    (folder / "tokenizer.json").write_text("{}")
    return model.eval()


def ours(folder: Path) -> TransformerLM:
    """The model of a folder of `cs336 import`."""
    with safe_open(folder / "weights.safetensors", framework="pt") as file:
        config = ModelConfig(**json.loads(file.metadata()["model"]))
    model = TransformerLM(config)
    with process_group("gloo", "cpu"):
        load_weights(folder, model)
    return model


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_round_trip_changes_no_bit(name, dtype, elsewhere, monkeypatch, capsys):
    """In one file and in several; what transformers loads is what it has saved, configuration and weights."""
    transformers = pytest.importorskip("transformers")
    sizes = {"max_shard_size": "10KB"} if dtype == torch.bfloat16 else {}
    before = published(name, elsewhere / "hf", dtype, **sizes)
    assert main(["import", "hf", "ours"]) == 0
    monkeypatch.setattr(hf_folders, "SHARD_BYTES", 20_000)
    like = ["--like", "hf"] if dtype == torch.float32 else []  # an import has its settings and tokenizer itself
    assert main(["export", "ours", "back", "--format", "hf", *like]) == 0
    assert (elsewhere / "back/model.safetensors.index.json").exists()
    assert (elsewhere / "back/tokenizer.json").read_text() == "{}"
    after = transformers.AutoModelForCausalLM.from_pretrained(elsewhere / "back", dtype="auto")
    assert type(after) is type(before)
    expected, found = before.state_dict(), after.state_dict()
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) and value.dtype == found[name].dtype for name, value in expected.items())
    ignored = {"transformers_version", "_name_or_path", "architectures", "dtype", "head_dim", "torch_dtype"}
    assert {k: v for k, v in after.config.to_dict().items() if k not in ignored} == {
        k: v for k, v in before.config.to_dict().items() if k not in ignored
    }


@pytest.mark.parametrize("name", CASES)
def test_the_logits_are_those_of_transformers(name, elsewhere, capsys):
    theirs = published(name, elsewhere / "hf")
    assert main(["import", "hf", "ours"]) == 0
    tokens = torch.randint(0, 90, (2, 40), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(ours(elsewhere / "ours")(tokens), theirs(tokens).logits, atol=1e-4, rtol=1e-4)


def test_a_config_of_transformers_4_is_read(elsewhere, capsys):
    """It has `rope_theta` and `rope_scaling` beside each other."""
    published("llama", elsewhere / "hf")
    path = elsewhere / "hf/config.json"
    values = json.loads(path.read_text())
    rope = values.pop("rope_parameters")
    values |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope}
    assert main(["import", "hf", "new"]) == 0
    path.write_text(json.dumps(values))
    assert main(["import", "hf", "old"]) == 0
    old, new = (files(elsewhere / name)["weights.safetensors"] for name in ("old", "new"))
    assert old == new


def test_an_import_without_its_tokenizer_or_its_settings_is_exported_all_the_same(elsewhere, capsys):
    published("llama", elsewhere / "hf")
    assert main(["import", "hf", "ours"]) == 0
    capsys.readouterr()
    assert main(["export", "ours/weights.safetensors", "from_file", "--format", "hf"]) == 0
    assert "tokenizer" not in capsys.readouterr().out
    assert (elsewhere / "from_file/tokenizer.json").exists()
    (elsewhere / "ours/tokenizer.json").unlink()
    assert main(["export", "ours", "without", "--format", "hf"]) == 0
    assert "; without a tokenizer: ours has none" in capsys.readouterr().out
    (elsewhere / "ours/config.json").write_text("{")
    assert main(["export", "ours", "damaged", "--format", "hf"]) == 0
    assert "without a tokenizer and the tokens that begin and end a text" in capsys.readouterr().out
    exported = [files(elsewhere / name)["model.safetensors"] for name in ("from_file", "without", "damaged")]
    assert exported == exported[:1] * 3


def test_a_run_starts_from_an_import_and_is_exported(elsewhere, capsys):
    """With the shape of the folder. Trained with a rate of 0 the model that comes out is the one that went in."""
    transformers = pytest.importorskip("transformers")
    before = published("qwen3-tied", elsewhere / "hf")
    assert main(["import", "hf", "ours"]) == 0
    assert "cs336 train --data data/tokens --init ours " in capsys.readouterr().out
    np.save(elsewhere / "tokens.npy", np.arange(400) ** 2 % 89)
    rate = "--learning_rate 1e-30 --weight_decay 0 --warmup_steps 0 --steps 1 --eval_every 0 --device cpu"
    assert main(f"train --data tokens.npy --init ours --output run --context_length 16 {rate}".split()) == 0
    assert main(["export", "run", "new/back", "--format", "hf"]) == 0
    assert "--like" in capsys.readouterr().out
    after = transformers.AutoModelForCausalLM.from_pretrained(elsewhere / "new/back")
    expected, found = before.state_dict(), after.state_dict()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())


def test_without_a_tokenizer_the_next_command_names_a_placeholder(elsewhere, capsys):
    published("llama", elsewhere / "hf")
    (elsewhere / "hf/tokenizer.json").unlink()
    assert main(["import", "hf", "ours"]) == 0
    printed = capsys.readouterr().out
    assert "no tokenizer.json in 'hf': get the model's own (90 tokens at most), then tokenize with: cs336" in printed
    assert "--tokenizer ours/tokenizer.json" not in printed


def test_data_of_other_tokens_than_the_imported_model_has(elsewhere, capfd):
    """Bytes of a text, and a vocabulary that is larger: each line has the command that makes data of its tokens."""
    published("llama", elsewhere / "hf")
    assert main(["import", "hf", "ours"]) == 0
    (elsewhere / "text.txt").write_text("a text " * 100)
    (elsewhere / "store").mkdir()
    write_store(elsewhere / "store", np.arange(91), [91])
    command = "--tokenizer ours/tokenizer.json --output"
    for data, named in (("text.txt", ["'text.txt' is text", command]), ("store", ["91", "'ours' has 90", command])):
        capfd.readouterr()
        assert_refused(["train", "--data", data, "--init", "ours", "--output", "run"], named, capfd)


def test_a_tokenizer_that_is_not_the_models_is_noticed(elsewhere, capsys):
    published("llama", elsewhere / "hf")
    assert main(["import", "hf", "ours"]) == 0
    (elsewhere / "store").mkdir()
    store = write_store(elsewhere / "store", np.arange(400) % 89, [400])
    settings = {"data": "store", "init": "ours"}
    assert build(TrainSettings, settings).has_other_tokenizer
    own = dataclasses.replace(store, tokenizer_hash=hashlib.sha256(b"{}").hexdigest())
    (elsewhere / "store/store.json").write_text(own.to_json())
    assert not build(TrainSettings, settings).has_other_tokenizer
    assert not build(TrainSettings, {**settings, "init": "ours/weights.safetensors"}).has_other_tokenizer


def test_a_tokenizer_of_ours_travels_along(elsewhere, capsys):
    """And a model that was trained on shorter sequences keeps its longest context."""
    published("llama", elsewhere / "hf")
    assert main(["import", "hf", "ours"]) == 0
    (elsewhere / "store").mkdir()
    write_store(elsewhere / "store", np.arange(60) % 7, [60])
    assert main(["export", "ours", "back", "--format", "hf", "--like", "store"]) == 0
    config = json.loads((elsewhere / "back/config.json").read_text())
    assert config["eos_token_id"] == read_store(elsewhere / "store").end_token
    assert (elsewhere / "back/tokenizer.json").exists() == (elsewhere / "store/tokenizer.json").exists()
    short = dataclasses.replace(model_of(config), context_length=8)
    assert config_of(short, "float32", config)["max_position_embeddings"] == config["max_position_embeddings"]


def test_ids_of_tokens_are_those_of_the_family_and_vocabulary(elsewhere, capfd):
    """A folder of another family gives its tokenizer alone; one with another vocabulary is refused."""
    for name in ("llama", "qwen3"):
        published(name, elsewhere / name)
        path = elsewhere / name / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": 7, "bos_token_id": 5}))
        (elsewhere / name / "generation_config.json").write_text('{"eos_token_id": 7}')
    assert main(["import", "llama", "ours"]) == 0
    for like, ids in (("llama", (5, 7)), ("qwen3", (None, None))):
        assert main(["export", "ours", f"like-{like}", "--format", "hf", "--like", like]) == 0
        assert ("another family" in capfd.readouterr().out) == (like == "qwen3")
        written = elsewhere / f"like-{like}"
        config = json.loads((written / "config.json").read_text())
        assert (config["bos_token_id"], config["eos_token_id"]) == ids
        assert (written / "tokenizer.json").is_file()
        assert (written / "generation_config.json").exists() == (like == "llama")
    path = elsewhere / "llama/config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 91}))
    (elsewhere / "store").mkdir()
    write_store(elsewhere / "store", np.arange(91), [91])
    for like in ("llama", "store"):
        words = ["export", "ours", "out", "--format", "hf", "--like", like]
        assert_refused(words, [f"'{like}' has a vocabulary of 91 tokens", "one of 90"], capfd)


CHANGES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "another architecture": ({"model_type": "mixtral"}, ["'mixtral'", "qwen3"]),
    "no architecture": ({"model_type": None}, ["None"]),
    "o_proj bias": ({"attention_bias": True}, ["attention_bias", "o_proj"]),
    "mlp bias": ({"mlp_bias": True}, ["mlp_bias"]),
    "rope type": ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, ["'yarn'", "llama3"]),
    "rope without values": ({"rope_parameters": {"rope_type": "llama3"}}, ["factor"]),
    "rope of text": ({"rope_parameters": "yarn"}, ["'yarn'"]),
    "partial rotation": ({"rope_parameters": {"partial_rotary_factor": 0.5}}, ["0.5"]),
    "sliding window": ({"use_sliding_window": True, "sliding_window": 8}, ["sliding window"]),
    "sliding layers": ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_attention"]),
    "activation": ({"hidden_act": "gelu"}, ["'gelu'"]),
    "quantized": ({"quantization_config": {"bits": 4}}, ["quantization_config"]),
    "a width of text": ({"hidden_size": "wide"}, ["config.json: hidden_size must be", "'wide'"]),
    "a negative width": ({"hidden_size": -32}, ["config.json: hidden_size must be", "-32"]),
    "layers of text": ({"num_hidden_layers": "two"}, ["config.json: num_hidden_layers must be", "'two'"]),
    "heads that do not divide": ({"num_key_value_heads": 3}, ["is not a multiple of num_key_value_heads 3"]),
    "tied by text": ({"tie_word_embeddings": "yes"}, ["config.json: tie_word_embeddings must be", "'yes'"]),
    "another width": ({"hidden_size": 64}, ["shape", "model.embed_tokens.weight"]),
    "more layers": ({"num_hidden_layers": 3}, ["'model.layers.2.", "missing"]),
    "fewer layers": ({"num_hidden_layers": 1}, ["'model.layers.1.", "no tensor of the model"]),
    "an enormous width": ({"hidden_size": 1 << 31, "intermediate_size": 1 << 31}, ["hf"]),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_config_that_is_not_supported(name, elsewhere, capfd):
    published("llama", elsewhere / "hf")
    path = elsewhere / "hf/config.json"
    changes, named = CHANGES[name]
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    capfd.readouterr()
    assert_refused(["import", "hf", "out"], named, capfd)


def test_a_field_that_is_missing(elsewhere, capfd):
    published("qwen2", elsewhere / "hf")
    path = elsewhere / "hf/config.json"
    for name in ("vocab_size", "num_key_value_heads", "rms_norm_eps"):
        whole = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in whole.items() if key != name}))
        capfd.readouterr()
        assert_refused(["import", "hf", "out"], [name], capfd)
        path.write_text(json.dumps(whole))


def _cut(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])


def _integers(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int64)}, folder / "model.safetensors")


def _own_head(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": torch.ones(90, 32)}, folder / "model.safetensors")


def _index(value: Any) -> Any:
    return lambda folder: (folder / "model.safetensors.index.json").write_text(json.dumps(value))


DAMAGES = {
    "cut": (_cut, ["model.safetensors", "safetensors"]),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), ["'hf'", "neither"]),
    "no config": (lambda folder: (folder / "config.json").unlink(), ["config.json"]),
    "config no JSON": (lambda folder: (folder / "config.json").write_text("{"), ["config.json"]),
    "config a list": (lambda folder: (folder / "config.json").write_text("[]"), ["config.json"]),
    "integers": (_integers, ["'model.norm.weight'", "I64"]),
    "a head that is not tied": (_own_head, ["lm_head"]),
    "index leads out": (_index({"weight_map": {"a": "../hf/model.safetensors"}}), ["../hf/model.safetensors"]),
    "index names nothing": (_index({"weight_map": {"a": "other.safetensors"}}), ["other.safetensors"]),
    "index of numbers": (_index({"weight_map": {"a": 3}}), ["index"]),
    "index of nothing": (_index([]), ["index"]),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_folder(name, elsewhere, capfd):
    published("llama-tied", elsewhere / "hf")
    damage, named = DAMAGES[name]
    damage(elsewhere / "hf")
    capfd.readouterr()
    assert_refused(["import", "hf", "out"], named, capfd)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("import missing out", ["no folder 'missing'; name a folder of a published model"]),
        ("import . out", ["'.' has no config.json; name a folder of a published model, with config.json and"]),
        ("import meta-llama/Llama-3.2-1B out", ["hf download meta-llama/Llama-3.2-1B --local-dir Llama-3.2-1B"]),
        ("import hf hf", ["'hf' exists; name a folder that does not exist"]),
        ("export ours hf --format hf", ["'hf' exists; name a folder that does not exist"]),
        ("import hf /proc/out", ["cannot write to '/proc/out'", "choose another place"]),
        ("export ours /proc/out --format hf", ["cannot write to '/proc/out'", "choose another place"]),
        ("export ours out --format hf --force", ["--force", "remove the folder or name one that does not exist"]),
        ("export ours out --format hf --step 3", ["--step"]),
        ("export ours out --format hf --like missing", ["missing"]),
        ("export hf/model.safetensors out --format hf", ["configuration of a model"]),
        ("export ours out --like hf", ["--format hf"]),
        ("export missing out --format hf", ["'missing'"]),
    ],
)
def test_mistakes(words, named, elsewhere, capfd):
    published("llama", elsewhere / "hf")
    assert main(["import", "hf", "ours"]) == 0
    capfd.readouterr()
    assert_refused(words.split(), named, capfd)


def test_a_full_disk_is_named_as_such_and_nothing_is_left(elsewhere, capfd, monkeypatch):
    published("llama", elsewhere / "hf")
    before = files(elsewhere)
    capfd.readouterr()

    def full(name, value, head_dim):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf_folders, "from_hf", full)
    assert main(["import", "hf", "out"]) == 1
    assert "No space left" in capfd.readouterr().err
    assert files(elsewhere) == before


def test_a_model_that_no_family_has(elsewhere, capfd):
    config = ModelConfig(vocab_size=16, d_model=8, num_layers=1, num_heads=2, d_ff=8, qkv_bias=True, qk_norm=True)
    tensors = {name: value.contiguous() for name, value in TransformerLM(config).state_dict().items()}
    save_file(tensors, "both.safetensors", {"model": json.dumps(config.to_dict())})
    assert_refused(["export", "both.safetensors", "out", "--format", "hf"], ["qkv_bias", "qk_norm"], capfd)


# -- memory -----------------------------------------------------------------------------------------------------------

LIMITED = """
import resource, sys
from pathlib import Path
import cs336_systems.cli, cs336_systems.train.hf.hf_export
from cs336_systems.cli import main
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (int(sys.argv[1]) << 20),) * 2)
sys.exit(main(sys.argv[2:]))
"""


def test_a_model_larger_than_the_memory_passes_through(elsewhere):
    """120 MB in files of 11 MB, within 100 MB beside what Python has at the start."""
    shape = {"vocab_size": 256, "d_model": 512, "d_ff": 2816, "num_heads": 8, "num_layers": 11}
    config = ModelConfig(context_length=16, **shape)
    (elsewhere / "hf").mkdir()
    with torch.device("meta"):
        sizes = {hf_folders.hf_name(name): value.shape for name, value in TransformerLM(config).state_dict().items()}
    layer_of = {name: name.rpartition("layers.")[2].split(".")[0] for name in sizes}
    for layer in set(layer_of.values()):
        names = [name for name in sizes if layer_of[name] == layer]
        found = {name: torch.zeros(sizes[name], dtype=torch.bfloat16) for name in names}
        save_file(found, elsewhere / f"hf/model-{layer}.safetensors", {"format": "pt"})
    index = {"weight_map": {name: f"model-{layer}.safetensors" for name, layer in layer_of.items()}}
    (elsewhere / "hf/model.safetensors.index.json").write_text(json.dumps(index))
    (elsewhere / "hf/config.json").write_text(json.dumps(hf_folders.config_of(config, "bfloat16")))
    env = clean_env(MALLOC_ARENA_MAX="1")
    done = execute(sys.executable, "-c", LIMITED, "100", "import", "hf", "ours", cwd=elsewhere, env=env)
    assert done.returncode == 0, done.stderr
    assert (elsewhere / "ours/weights.safetensors").stat().st_size > 110_000_000
