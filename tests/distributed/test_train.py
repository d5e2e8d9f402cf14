"""Training: the order of the data, steps against a plain loop, and that a run goes on bit by bit as if nothing had
happened: after a stop, a kill, a damaged checkpoint, a full disk, on other numbers of ranks.

Starting ranks takes seconds, so each start of them goes through all the runs of `train_cases` that it can.
"""

import contextlib
import hashlib
import json
import logging
import math
import multiprocessing
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from cs336_systems.config import UserError
from cs336_systems.parallel.launch import Rank, process_group, spawn
from cs336_systems.train.data import Corpus, shuffled
from cs336_systems.train.loop import STOPPED, Trainer
from cs336_systems.train.settings import TrainSettings
from tests.distributed.train_cases import Outcome, Run, command, perform, play, weights_of
from tests.helpers import CPU_ONLY, clean_env, execute, running, wait_until

pytestmark = pytest.mark.xdist_group("ranks")  # one at a time: a test has up to four busy processes

LIMIT = 120.0
"""Seconds for ranks that need ten, more on a busy machine. Past it the traceback says where they hang."""
SHAPE = {"context_length": 16, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ff": 32}
PARALLEL = ("ddp", "ddp-sharded", "fsdp")
STEPS = 8


def text_of(length: int, seed: int = 0) -> bytes:
    letters = random.Random(seed)
    return "".join(letters.choice("abcde fghij\n") for _ in range(length)).encode()


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """With a text of 18 sequences to train on, an epoch of four steps and a half; and a longer one."""
    folder = tmp_path_factory.mktemp("train")
    (folder / "short.txt").write_bytes(text_of(330))
    (folder / "long.txt").write_bytes(text_of(5000))
    (folder / "other.txt").write_bytes(text_of(5000, seed=1))
    return folder


def fields(output: Path, data: str = "short.txt", **changes) -> dict:
    """Settings of the smallest run; `data` is a file beside `output`'s folder."""
    return {
        "data": str(output.parent / data),
        "output": str(output),
        **SHAPE,
        "steps": STEPS,
        "batch_size": 4,
        "warmup_steps": 1,
        "learning_rate": 1e-2,
        "log_every": 1,
        "eval_every": 0,
        "save_every": 100,
        "device": "cpu",
        "parallel": "none",
        **changes,
    }


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the ranks and commands have it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.disable(logging.DEBUG)  # torch's checkpoints log each tensor, and pytest would keep it all
    yield
    logging.disable(logging.NOTSET)
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def alone() -> Rank:
    """This process, as a group of one."""
    with process_group("gloo", "cpu") as rank:
        yield rank


# -- what a run left behind -------------------------------------------------------------------------------------------


def lines_of(output: str | Path) -> list[dict]:
    """Whole lines of records.jsonl."""
    lines = (Path(output) / "records.jsonl").read_text().split("\n")[:-1]
    return [json.loads(line) for line in lines]


def recorded(output: str | Path, metric: str) -> dict[int, float]:
    """Step -> value; what was written later counts."""
    found = {}
    for line in lines_of(output):
        if line["experiment"] == "train" and line["metric"] == metric:
            first = line["config"]["first_step"]
            found |= {first + i: float(sample) for i, sample in enumerate(line["samples"])}
    return found


def losses_of(output: str | Path) -> list[float]:
    found = recorded(output, "loss")
    assert list(found) == sorted(found)
    assert len(found) == max(found) - min(found) + 1
    return list(found.values())


def checkpoints(output: str | Path) -> dict[int, Path]:
    found = (Path(output) / "checkpoints").glob("step-*")
    return {int(path.name.removeprefix("step-")): path for path in sorted(found) if ".tmp" not in path.name}


def newest(output: str | Path) -> int:
    return max(checkpoints(output), default=0)


def leftovers(output: str | Path) -> list[str]:
    return [path.name for path in (Path(output) / "checkpoints").iterdir() if "tmp" in path.name]


def digest(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_same_weights(found: Outcome, expected: Outcome, tolerance: float = 0.0) -> None:
    assert found.weights.keys() == expected.weights.keys()
    assert found.weights
    for name, value in found.weights.items():
        torch.testing.assert_close(value, expected.weights[name], rtol=0, atol=tolerance, msg=lambda m, n=name: n + m)


def assert_same(found: Outcome, expected: Outcome) -> None:
    """Bit by bit."""
    assert_same_weights(found, expected)
    assert len(found.states) == len(expected.states) > 0
    for one, other in zip(found.states, expected.states, strict=True):
        assert torch.equal(one, other)
    assert (found.step, found.skipped, found.loss_scale) == (expected.step, expected.skipped, expected.loss_scale)


def loaded(run_fields: dict) -> Outcome:
    """What the folder of a run holds."""
    outcome = perform(Run(run_fields, trains=False))
    assert (outcome.crash, outcome.error) == ("", "")
    return outcome


# -- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": ""}, "--data"),
        ({"data": "missing.txt"}, "missing.txt"),
        ({"data": "."}, r"'\.'"),
        ({"steps": 0}, "steps.*0"),
        ({"batch_size": 0}, "batch_size.*0"),
        ({"micro_batch_size": -1}, "micro_batch_size.*-1"),
        ({"learning_rate": 0.0}, "learning_rate.*0"),
        ({"learning_rate": -1.0}, "learning_rate.*-1"),
        ({"learning_rate": math.nan}, "learning_rate.*nan"),
        ({"learning_rate": math.inf}, "learning_rate.*inf"),
        ({"warmup_steps": 8}, "warmup_steps.*8"),
        ({"warmup_steps": -1}, "warmup_steps.*-1"),
        ({"validation_share": 0.0}, r"validation_share.*0\.0"),
        ({"validation_share": 1.0}, r"validation_share.*1\.0"),
        ({"validation_share": math.nan}, "validation_share.*nan"),
        ({"final_share": 1.5}, r"final_share.*1\.5"),
        ({"max_grad_norm": -1.0}, "max_grad_norm.*-1"),
        ({"weight_decay": -0.5}, r"weight_decay.*-0\.5"),
        ({"beta1": 1.0}, r"beta1.*1\.0"),
        ({"beta2": -0.1}, r"beta2.*-0\.1"),
        ({"save_every": 0}, "save_every.*0"),
        ({"keep": 0}, "keep.*0"),
        ({"keep_every": -1}, "keep_every.*-1"),
        ({"eval_every": -1}, "eval_every.*-1"),
        ({"eval_batches": 0}, "eval_batches.*0"),
        ({"most_skipped": 0}, "most_skipped.*0"),
        ({"loss_scale_growth": 0}, "loss_scale_growth.*0"),
        ({"size": "huge"}, "'huge'"),
        ({"d_model": 6}, "6 / 2 = 3"),
        ({"d_model": 17}, "d_model 17"),
        ({"num_layers": 0}, "num_layers.*0"),
    ],
    ids=lambda value: "" if isinstance(value, str) else " ".join(f"{name}={one}" for name, one in value.items()),
)
def test_settings_that_cannot_be(changes, named, place):
    with pytest.raises(UserError, match=named) as caught:
        TrainSettings(**{**fields(place / "none"), **changes})
    assert "\n" not in str(caught.value)


def test_the_model_of_a_text_has_bytes_for_tokens(place, tmp_path):
    settings = TrainSettings(**fields(place / "none"))
    assert (settings.model.vocab_size, settings.model.d_model, settings.model.context_length) == (256, 16, 16)
    (tmp_path / "t.bin").write_bytes(b"\0\0")
    assert TrainSettings(data=str(tmp_path / "t.bin")).model.vocab_size == 10_000


@pytest.mark.parametrize(
    ("batch", "micro", "ranks", "expected"), [(8, 8, 1, 1), (8, 2, 2, 2), (12, 1, 4, 3), (4, 8, 4, 1)]
)
def test_micro_batches(batch, micro, ranks, expected, place):
    settings = TrainSettings(**fields(place / "none", batch_size=batch, micro_batch_size=micro))
    assert settings.micro_batches(ranks) == expected


@pytest.mark.parametrize(("batch", "micro", "ranks"), [(8, 8, 3), (3, 1, 2), (2, 1, 4), (12, 5, 1), (12, 4, 2)])
def test_batches_that_cannot_be_shared_out(batch, micro, ranks, place):
    settings = TrainSettings(**fields(place / "none", batch_size=batch, micro_batch_size=micro))
    with pytest.raises(UserError, match=str(batch if batch % ranks else micro)):
        settings.micro_batches(ranks)


# -- data -------------------------------------------------------------------------------------------------------------

CONTEXT = 16


@pytest.fixture
def counting(tmp_path) -> Corpus:
    """Every token is its own place in the file."""
    np.save(tmp_path / "count.npy", np.arange(1000))
    return Corpus.open(tmp_path / "count.npy", context_length=CONTEXT, vocab_size=1000, validation_share=0.1)


def test_every_epoch_goes_through_all_sequences_once(counting):
    each = counting.training_sequences
    assert 54 <= each <= 56  # of 900 tokens, 16 to a sequence
    epochs = []
    for epoch in range(3):
        inputs, targets = counting.training(seed=5, first=epoch * each, count=each)
        assert inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (each, CONTEXT)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(inputs - inputs[:, :1], torch.arange(CONTEXT).expand(each, -1))
        assert len(inputs.unique()) == each * CONTEXT  # nothing twice
        epochs.append(inputs[:, 0].tolist())
    assert sorted(epochs[0]) == sorted(epochs[1]) == sorted(epochs[2])
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
    assert all(epoch != sorted(epoch) for epoch in epochs)


def test_a_sequence_does_not_depend_on_how_it_is_asked_for(counting):
    each = counting.training_sequences
    inputs, targets = counting.training(seed=5, first=0, count=3 * each)
    for parts in (1, 7, each - 1, each + 1):
        for first in range(0, 3 * each, parts):
            count = min(parts, 3 * each - first)
            some, shifted = counting.training(seed=5, first=first, count=count)
            assert torch.equal(some, inputs[first : first + count])
            assert torch.equal(shifted, targets[first : first + count])
    other, _ = counting.training(seed=6, first=0, count=each)
    assert not torch.equal(other, inputs[:each])
    far = 10**9
    assert torch.equal(counting.training(5, far, 2)[0][1], counting.training(5, far + 1, 1)[0][0])


def test_the_end_of_the_file_is_never_trained_on(counting):
    everything = counting.training(seed=0, first=0, count=counting.training_sequences)
    trained = {int(token) for t in everything for token in t.flatten()}
    for first, count in ((0, 3), (2, 5)):
        inputs, targets = counting.validation(first, count)
        assert inputs.shape == (count, CONTEXT)
        assert inputs.dtype == torch.int64
        assert torch.equal(targets, inputs + 1)
        validated = {int(token) for t in (inputs, targets) for token in t.flatten()}
        assert min(validated) > max(trained)
        assert min(validated) >= 900 - 1
    one, _ = counting.validation(0, 3)
    assert torch.equal(one[2], counting.validation(2, 1)[0][0])
    assert len(one.unique()) == 3 * CONTEXT


@pytest.mark.parametrize(("share", "trained"), [(0.5, 500), (0.05, 950), (0.2, 800)])
def test_the_share_of_validation(share, trained, tmp_path):
    np.save(tmp_path / "count.npy", np.arange(1000))
    corpus = Corpus.open(tmp_path / "count.npy", context_length=CONTEXT, vocab_size=1000, validation_share=share)
    assert abs(corpus.training_sequences - trained / CONTEXT) <= 1
    assert corpus.validation(0, 1)[0].min() >= trained - 1


@pytest.mark.parametrize("dtype", ["uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", ".bin", "text"])
def test_formats(dtype, tmp_path):
    tokens = np.random.default_rng(0).integers(0, 250, 800)
    if dtype == ".bin":
        path = tmp_path / "t.bin"
        tokens.astype("<u2").tofile(path)
    elif dtype == "text":
        path = tmp_path / "t.txt"
        path.write_bytes(tokens.astype(np.uint8).tobytes())
    else:
        path = tmp_path / "t.npy"
        np.save(path, tokens.astype(dtype))
    corpus = Corpus.open(path, context_length=CONTEXT, vocab_size=256, validation_share=0.1)
    if sys.platform == "linux":
        assert str(path) in Path("/proc/self/maps").read_text()  # in memory only where it is read
    inputs, targets = corpus.training(seed=0, first=0, count=corpus.training_sequences)
    windows = {tokens[i : i + CONTEXT + 1].tobytes() for i in range(len(tokens) - CONTEXT)}
    for row, shifted in zip(inputs, targets, strict=True):
        assert np.append(row.numpy(), shifted[-1].numpy()).tobytes() in windows


@given(count=st.integers(1, 400), seed=st.integers(0, 2**40), epoch=st.integers(0, 10**6))
def test_a_shuffle_is_a_permutation_of_every_epoch(count, seed, epoch):
    order = [int(shuffled(epoch * count + n, count, seed)) for n in range(count)]
    assert sorted(order) == list(range(count))


def test_a_shuffle_mixes_well():
    """Each place is taken by every sequence about equally often, and neighbours do not stay neighbours."""
    count, epochs = 8, 2000
    at = np.array([[int(shuffled(e * count + n, count, 3)) for n in range(count)] for e in range(epochs)])
    for place_of in range(count):
        often = np.bincount(at[:, place_of], minlength=count) / epochs
        assert often.min() > 0.08
        assert often.max() < 0.18
    follows = (np.diff(at, axis=1) == 1).mean()  # 1/8 by chance: 7 of 56 pairs
    assert follows < 0.2


BAD_FILES = {
    "empty.txt": lambda path: path.write_bytes(b""),
    "empty.bin": lambda path: path.write_bytes(b""),
    "empty.npy": lambda path: path.write_bytes(b""),
    "nothing.npy": lambda path: np.save(path, np.zeros(0, int)),
    "short.txt": lambda path: path.write_bytes(b"a" * CONTEXT),
    "short.bin": lambda path: path.write_bytes(b"a" * 2 * CONTEXT),
    "short.npy": lambda path: np.save(path, np.zeros(CONTEXT, int)),
    "odd.bin": lambda path: path.write_bytes(b"\0" * 2001),
    "flat.npy": lambda path: np.save(path, np.zeros((100, 100), int)),
    "float.npy": lambda path: np.save(path, np.zeros(10_000)),
    "objects.npy": lambda path: np.save(path, np.array([1, "a"] * 1000, object)),
    "high.npy": lambda path: np.save(path, np.full(10_000, 256)),
    "negative.npy": lambda path: np.save(path, np.full(10_000, -1)),
    "high.bin": lambda path: np.full(10_000, 256, "<u2").tofile(path),
    "no.npy": lambda path: path.write_bytes(b"this is not an array" * 1000),
    "cut.npy": lambda path: (np.save(path, np.zeros(10_000, int)), os.truncate(path, 4000)),
    "missing.txt": lambda path: None,
    "folder.txt": lambda path: path.mkdir(),
}


def read_all(path: Path, vocab_size: int) -> None:
    corpus = Corpus.open(path, context_length=CONTEXT, vocab_size=vocab_size, validation_share=0.1)
    corpus.training(0, 0, corpus.training_sequences)
    corpus.validation(0, 6)


@pytest.mark.parametrize("name", BAD_FILES)
def test_files_that_cannot_be_used(name, tmp_path):
    path = tmp_path / name
    BAD_FILES[name](path)
    with pytest.raises(UserError, match=name) as caught:
        read_all(path, vocab_size=256)
    assert "\n" not in str(caught.value)


def test_one_token_too_high_is_found(tmp_path):
    """Wherever it is: in what is trained on, or in what is not."""
    for at in (0, 450, 899, 999):
        tokens = np.zeros(1000, int)
        tokens[at] = 300
        path = tmp_path / f"{at}.npy"
        np.save(path, tokens)
        with pytest.raises(UserError, match="300"):
            read_all(path, vocab_size=300)


# -- steps ------------------------------------------------------------------------------------------------------------


def test_against_a_plain_loop(place, alone):
    """Also that norms have no weight decay, and that the first steps see the first sequences of the run."""
    changes = {"micro_batch_size": 2, "num_layers": 2, "weight_decay": 0.3, "max_grad_norm": 0.5, "beta2": 0.9}
    settings = TrainSettings(**fields(place / "plain", **changes))
    trainer = Trainer(settings, alone)
    trainer.resume()
    config = settings.model
    corpus = Corpus.open(settings.data, context_length=16, vocab_size=256, validation_share=settings.validation_share)

    from cs336_systems.model import TransformerLM

    model = TransformerLM(config)
    model.load_state_dict(weights_of(trainer.step.model))
    started_from = weights_of(trainer.step.model)
    assert trainer.run() == 0

    rates = list(recorded(settings.output, "learning_rate").values())
    norms = list(recorded(settings.output, "gradient_norm").values())
    losses = losses_of(settings.output)
    assert len(rates) == len(norms) == len(losses) == STEPS
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.9))
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = rates[step]
        inputs, targets = corpus.training(settings.seed, step * 4, 4)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert losses[step] == pytest.approx(loss.item(), abs=1e-5)
        assert norms[step] == pytest.approx(norm.item(), rel=1e-4)
    found = weights_of(trainer.step.model)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5)
    assert any((found[name] - started_from[name]).abs().max() > 0.01 for name in found)
    assert min(norms) > 0.5  # else clipping was not tested


def test_records(place, alone):
    settings = fields(place / "records", steps=12, warmup_steps=4, final_share=0.25, eval_every=4, log_every=5)
    assert perform(Run(settings)).code == 0
    output = settings["output"]
    steps = list(recorded(output, "loss"))
    assert len(steps) == 12
    for metric in ("loss", "gradient_norm", "learning_rate", "step_time"):
        values = recorded(output, metric)
        assert list(values) == list(range(steps[0], steps[0] + 12)), metric
        assert all(math.isfinite(value) for value in values.values())
    rates = list(recorded(output, "learning_rate").values())
    peak = rates.index(max(rates))
    assert max(rates) == pytest.approx(1e-2)
    assert 3 <= peak <= 4
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    assert 0.25e-2 <= rates[-1] < 0.4e-2
    validated = [line for line in lines_of(output) if line["metric"] == "validation_loss"]
    values = [float(sample) for line in validated for sample in line["samples"]]
    assert len(values) == 3
    assert all(1 < value < 8 for value in values)
    assert values[-1] < losses_of(output)[0]  # it has learnt
    assert all(line["environment"]["torch"] for line in lines_of(output))


@pytest.mark.parametrize(
    ("precision", "changes"),
    [
        *((precision, {}) for precision in ("fp32", "bf16", "fp16")),
        ("fp32", {"fast": "on"}),
        ("bf16", {"fast": "on"}),
        ("bf16", {"fast": "optimizer"}),
        ("fp16", {"fast": "kernels,loss"}),
        ("fp32", {"async_save": True, "save_every": 1, "keep": 3}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else value,
)
def test_a_stop_at_any_step_changes_nothing(precision, changes, place, alone, tmp_path):
    """On one rank. With fp16 the loss scale grows on the way."""
    same = {"precision": precision, "micro_batch_size": 2, "loss_scale_growth": 3, "num_layers": 2, **changes}
    same["data"] = str(place / "short.txt")
    place = tmp_path
    whole = fields(place / f"one-{precision}", **same)
    expected = perform(Run(whole))
    assert (expected.code, expected.resumed_at, expected.step) == (0, 0, STEPS)
    losses = losses_of(whole["output"])
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]
    scales: list[float] = []
    for stop in (1, 4, 5, 7):
        parts = fields(place / f"one-{precision}-{stop}", **same)
        first = perform(Run(parts, stop_after=stop))
        assert (first.code, first.step, newest(parts["output"])) == (STOPPED, stop, stop)
        torch.manual_seed(stop)
        second = perform(Run(parts))
        assert (second.code, second.resumed_at) == (0, stop)
        assert_same(second, expected)
        assert losses_of(parts["output"]) == losses
        scales.append(first.loss_scale)
    if precision == "fp16":
        assert expected.loss_scale == 2 * scales[1] == 4 * scales[0]


def test_the_fast_step_goes_on_where_the_plain_one_stopped_and_back(place, alone, tmp_path):
    same = {"data": str(place / "short.txt")}
    plain, fast = (fields(tmp_path / way, fast=way, **same) for way in ("off", "on"))
    mixed = fields(tmp_path / "mixed", **same)
    expected, found = perform(Run(plain)), perform(Run(fast))
    for stop, way in ((2, "off"), (5, "on"), (7, "off")):
        assert perform(Run({**mixed, "fast": way}, stop_after=stop)).code == STOPPED
    last = perform(Run({**mixed, "fast": "on"}))
    for other in (found, last):
        assert (other.code, other.step) == (0, STEPS)
        for name, weights in expected.weights.items():
            torch.testing.assert_close(other.weights[name], weights, rtol=1e-4, atol=1e-5)
    assert losses_of(fast["output"]) == pytest.approx(losses_of(plain["output"]), rel=1e-4)
    assert losses_of(mixed["output"]) == pytest.approx(losses_of(plain["output"]), rel=1e-4)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bad_step_of_the_fast_step_changes_nothing(precision, place, alone, tmp_path):
    same = {"fast": "on", "precision": precision, "max_grad_norm": 0.0, "data": str(place / "short.txt")}
    once = fields(tmp_path / "bad", **same)
    outcome = perform(Run(once, fault="nan in every other step"))
    assert (outcome.code, outcome.skipped) == (0, 4)
    assert all(weights.isfinite().all() for weights in outcome.weights.values())
    too_many = perform(Run(fields(tmp_path / "worse", **same, most_skipped=3), fault="nan in every step"))
    assert "3 steps in a row" in too_many.error


@pytest.mark.parametrize("fault", ["one save", "every save"])
def test_a_save_beside_the_training_that_fails_does_not_end_the_run(fault, place, alone, tmp_path):
    settings = fields(tmp_path / "beside", data=str(place / "short.txt"), async_save=True, save_every=2, keep=9)
    outcome = perform(Run(settings, fault=fault))
    assert outcome.step == STEPS
    assert "not saved" in outcome.said
    if fault == "one save":
        assert outcome.code == 0
        assert newest(settings["output"]) == STEPS
    else:
        assert outcome.code == 1
        assert checkpoints(settings["output"]) == {}
    assert not list((tmp_path / "beside" / "checkpoints").glob("*.tmp-*"))


@pytest.mark.parametrize(
    ("parallel", "ranks", "fast", "parts"),
    [
        ("none", 1, "on", {"kernels", "loss", "optimizer"}),
        ("ddp", 1, "on", {"kernels", "loss", "optimizer"}),
        ("ddp", 2, "on", set()),
        ("ddp", 2, "kernels,loss", {"kernels", "loss"}),
        ("ddp-sharded", 2, "kernels", {"kernels"}),
        ("fsdp", 2, "on", set()),
        ("fsdp", 2, None, set()),
        ("ddp", 2, "loss", {"loss"}),
        ("none", 1, None, set()),
    ],
)
def test_parts_of_the_fast_step_that_can_be_had(parallel, ranks, fast, parts, place):
    settings = TrainSettings(**fields(place / "x", parallel=parallel, fast=fast))
    assert settings.run_config("cpu", ranks).fast_parts == parts


@pytest.mark.parametrize(
    ("changes", "device", "ranks", "named"),
    [
        ({"fast": "optimizer", "parallel": "ddp"}, "cpu", 2, "optimizer cannot be had with 2 ranks"),
        ({"fast": "loss", "parallel": "fsdp"}, "cpu", 2, "loss cannot be had with 2 ranks"),
        ({"fast": "graph"}, "cuda", 1, "needs the optimizer"),
        ({"fast": "graph"}, "cpu", 1, "needs a CUDA GPU"),
        ({"fast": "everything"}, "cpu", 1, "everything"),
    ],
)
def test_parts_of_the_fast_step_that_cannot_be_had(changes, device, ranks, named, place):
    settings = TrainSettings(**fields(place / "x", **changes))
    with pytest.raises(UserError, match=named):
        settings.run_config(device, ranks)


def test_a_gpu_trains_fast_unless_told_otherwise(place):
    settings = TrainSettings(**fields(place / "x", precision="bf16"))
    assert settings.run_config("cuda", 1).fast_parts == {"kernels", "loss", "optimizer", "graph"}
    assert settings.run_config("cuda", 2).fast_parts == set()  # over before Python has launched the kernels
    large = {"parallel": "ddp", "d_model": 4096, "context_length": 2048}
    several = TrainSettings(**{**fields(place / "x", precision="bf16"), **large})
    assert several.run_config("cuda", 2).fast_parts == {"kernels", "loss"}


def test_tensorboard_that_is_not_there(place, monkeypatch, alone):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    outcome = perform(Run(fields(place / "board", tensorboard=True)))
    assert "pip install tensorboard" in outcome.error


def test_tensorboard(place, monkeypatch, alone):
    written = []

    class Writer:
        def __init__(self, folder):
            written.append(folder)

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def flush(self):
            pass

    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    settings = fields(place / "board", tensorboard=True, eval_every=4, sample_tokens=1)
    assert perform(Run(settings)).code == 0
    assert written[0] == str(place / "board" / "tensorboard")
    assert [step for name, step in written[1:] if name == "loss"] == list(range(1, STEPS + 1))
    assert ("validation_loss", 4) in written


def test_no_record_is_lost_at_a_stop(place, alone):
    """Also of steps that no line was printed for yet."""
    whole, parts = fields(place / "rare", log_every=3), fields(place / "rare-parts", log_every=3)
    perform(Run(whole))
    assert perform(Run(parts, stop_after=4)).code == STOPPED
    perform(Run(parts))
    assert losses_of(parts["output"]) == losses_of(whole["output"])
    assert len(losses_of(parts["output"])) == STEPS


def test_a_run_can_be_made_longer(place, alone):
    settings = fields(place / "longer", steps=4)
    assert perform(Run(settings)).code == 0
    again = perform(Run(settings))
    assert (again.code, again.resumed_at, again.step) == (0, 4, 4)
    longer = perform(Run({**settings, "steps": 6, "save_every": 1, "eval_every": 2}))
    assert (longer.code, longer.resumed_at, longer.step) == (0, 4, 6)
    assert len(losses_of(settings["output"])) == 6


def test_evaluations_and_samples_change_nothing(place, alone):
    plain = fields(place / "without")
    evaluated = fields(place / "with", eval_every=2, sample_prompt="abc", sample_tokens=20)
    without, shown = perform(Run(plain)), perform(Run(evaluated))
    assert losses_of(plain["output"]) == losses_of(evaluated["output"])
    assert_same(shown, without)
    assert shown.said.count("abc") >= 4
    assert len(shown.said) > len(without.said)
    assert recorded(plain["output"], "loss").keys() == recorded(evaluated["output"], "loss").keys()


@pytest.mark.parametrize("prompt", ["", "a" * 40, "\u6587\u5b57"], ids=["empty", "long", "not ASCII"])
def test_prompts_of_any_kind(prompt, place, alone):
    """The first sample comes after hours of training: a prompt must not end it."""
    settings = fields(place / f"prompt-{len(prompt)}", steps=2, eval_every=1, sample_prompt=prompt, vocab_size=128)
    found = perform(Run(settings))
    assert (found.crash, found.code) == ("", 0)


# -- damaged checkpoints ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def two_saved(place, alone) -> tuple[dict, Outcome, Outcome]:
    """A run that was stopped in step 4, with checkpoints of steps 2 and 4; what they hold."""
    settings = fields(place / "two", save_every=2)
    four = perform(Run(settings, stop_after=4))
    assert sorted(checkpoints(settings["output"])) == [2, 4]
    only_two = copied(settings, "two-2")
    shutil.rmtree(checkpoints(only_two["output"])[4])
    two = loaded(only_two)
    assert (two.resumed_at, four.step) == (2, 4)
    assert_same(loaded(settings), four)
    return settings, two, four


def copied(settings: dict, name: str) -> dict:
    target = Path(settings["output"]).with_name(name)
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(settings["output"], target)
    return {**settings, "output": str(target)}


def flip(path: Path, at: float = 0.5) -> None:
    data = bytearray(path.read_bytes())
    data[int(at * (len(data) - 1))] ^= 1
    path.write_bytes(data)


def exchange(path: Path) -> None:
    """For the file of that name of the older checkpoint."""
    path.write_bytes((checkpoints(path.parents[2])[2] / path.name).read_bytes())


DAMAGES = {
    "emptied": lambda path: path.write_bytes(b""),
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1),
    "halved": lambda path: os.truncate(path, path.stat().st_size // 2),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"\0"),
    "flipped at its start": lambda path: flip(path, 0.0),
    "flipped": flip,
    "flipped at its end": lambda path: flip(path, 1.0),
    "garbage": lambda path: path.write_bytes(os.urandom(path.stat().st_size)),
    "deleted": Path.unlink,
    "exchanged": exchange,
}


def assert_fell_back(found: Outcome, two: Outcome, *named: str) -> None:
    assert (found.crash, found.error) == ("", "")
    assert found.resumed_at == 2, f"a silent load: {found.said}"
    assert_same(found, two)
    assert any(word in found.said for word in named), found.said


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_not_loaded(damage, two_saved):
    """Any file of it: the previous checkpoint is, and a warning says which was left out and why."""
    settings, two, _ = two_saved
    names = sorted(path.name for path in checkpoints(settings["output"])[4].rglob("*") if path.is_file())
    assert "manifest.json" in names
    assert len(names) >= 2
    for name in names:
        broken = copied(settings, "damaged")
        folder = checkpoints(broken["output"])[4]
        (path,) = folder.rglob(name)
        before = path.read_bytes()
        DAMAGES[damage](path)
        if path.exists() and path.read_bytes() == before:
            assert damage == "exchanged"
            continue
        found = perform(Run(broken, trains=False))
        assert_fell_back(found, two, *(names if damage == "exchanged" else [name]))
        assert folder.name in found.said


def test_a_changed_byte_of_the_manifest_is_never_believed(two_saved):
    """Not even where the manifest is still JSON: a digit of the step, of the loss scale, of a checksum."""
    settings, _, _ = two_saved
    whole = (checkpoints(settings["output"])[4] / "manifest.json").read_bytes()
    believed = []
    places = [*range(0, len(whole), max(1, len(whole) // 40)), *(i for i, byte in enumerate(whole) if byte in b"4")]
    for i in places[:80]:
        data = bytearray(whole)
        data[i] ^= 1
        broken = copied(settings, "manifest")
        folder = checkpoints(broken["output"])[4]
        (folder / "manifest.json").write_bytes(data)
        found = perform(Run(broken, trains=False))
        if found.error or found.crash or found.resumed_at != 2 or folder.name not in found.said:
            believed.append((whole[max(0, i - 20) : i + 10], found.error, found.crash[-100:], found.resumed_at))
    assert believed == []


def test_a_damaged_checkpoint_alone_is_no_silent_start(two_saved):
    settings, _, _ = two_saved
    broken = copied(settings, "both")
    folders = list(checkpoints(broken["output"]).values())
    for folder in folders:
        flip(max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size))
    found = perform(Run(broken, trains=False))
    assert found.error or found.resumed_at == 0
    assert all(path.name in found.error + found.said for path in folders)


@pytest.mark.parametrize("save_every", [2, 1])
def test_a_run_goes_on_past_a_damaged_checkpoint(save_every, two_saved, place, alone):
    """Its place is taken by a good one; and it does not count among those that are kept: of two saved two are valid."""
    settings, _, _ = two_saved
    broken = {**copied(settings, f"past-{save_every}"), "save_every": save_every, "keep": 2}
    path = max(checkpoints(broken["output"])[4].iterdir(), key=lambda path: path.stat().st_size)
    flip(path)
    if save_every == 1:
        assert perform(Run(broken, stop_after=3)).step == 3
        spare = copied(broken, "past-spare")
        shutil.rmtree(checkpoints(spare["output"])[3])
        assert loaded(spare).resumed_at == 2
    found = perform(Run(broken))
    assert found.code == 0
    whole = fields(place / f"past-whole-{save_every}")
    assert_same(found, perform(Run(whole)))
    assert losses_of(broken["output"]) == losses_of(whole["output"])
    assert_same(loaded(broken), found)
    assert len(checkpoints(broken["output"])) == 2


def test_a_damaged_last_checkpoint_is_made_again(two_saved):
    """Else a finished run would never be finished: every call would train the same steps, and say they were saved."""
    settings, _, _ = two_saved
    broken = {**copied(settings, "last"), "steps": 4}
    flip(max(checkpoints(broken["output"])[4].iterdir(), key=lambda path: path.stat().st_size))
    again = perform(Run(broken))
    assert (again.code, again.resumed_at, again.step) == (0, 2, 4)
    found = loaded(broken)
    assert found.resumed_at == 4, found.said
    assert_same(found, again)


def test_what_a_killed_save_left_is_removed_and_not_loaded(two_saved):
    settings, _, four = two_saved
    strewn = copied(settings, "strewn")
    newest_one = checkpoints(strewn["output"])[4]
    folder, name = newest_one.parent, newest_one.name.removesuffix("4")
    shutil.copytree(newest_one, folder / f"{name}6.tmp-123")
    (folder / f"{name}8.tmp-99").mkdir()
    found = loaded(strewn)
    assert found.resumed_at == 4
    assert_same(found, four)
    assert sorted(path.name for path in folder.glob("step-*")) == [f"{name}2", f"{name}4"]


# -- saves that fail --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", ["one save", "one rename", "one write", "every save"])
def test_a_save_that_fails_does_not_end_the_run(fault, two_saved, alone):
    """Steps 6 and 8 are saved; of the first one, or of both, nothing is left."""
    settings, _, four = two_saved
    full = {**copied(settings, "full"), "steps": 8, "keep": 5}
    older = {step: digest(path) for step, path in checkpoints(full["output"]).items()}
    found = perform(Run(full, fault=fault))
    assert (found.crash, found.error, found.resumed_at, found.step) == ("", "", 4, 8)
    assert "No space left on device" in found.said
    assert sorted(checkpoints(full["output"])) == ([2, 4] if fault == "every save" else [2, 4, 8])
    assert leftovers(full["output"]) == []
    assert {step: digest(checkpoints(full["output"])[step]) for step in older} == older
    whole = {**copied(settings, "not-full"), "steps": 8}
    assert_same(found, perform(Run(whole)))
    assert_same(loaded(full), four if fault == "every save" else found)
    assert len(losses_of(full["output"])) == 8


def test_a_record_that_cannot_be_written_is_no_traceback(place, alone):
    """Records lie on the same full disk: training goes on, or ends with one line."""
    found = perform(Run(fields(place / "unrecorded"), fault="one record"))
    assert found.crash == ""
    assert "No space left on device" in found.error + found.said
    assert found.error or (found.code, found.step) == (0, STEPS)


# -- another run in the same folder -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"d_model": 32}, ["d_model"]),
        ({"num_layers": 2}, ["num_layers"]),
        ({"context_length": 8}, ["context_length"]),
        ({"num_heads": 1}, ["num_heads"]),
        ({"vocab_size": 300}, ["vocab_size"]),
        ({"batch_size": 8}, ["batch_size"]),
        ({"seed": 1}, ["seed"]),
        ({"data": "long.txt"}, ["data"]),
        ({"precision": "bf16"}, ["precision"]),
        ({"validation_share": 0.2}, ["validation_share"]),
        ({"seed": 1, "d_ff": 64}, ["seed", "d_ff"]),
    ],
    ids=lambda value: " ".join(value),
)
def test_another_run_is_refused(changes, named, two_saved, place):
    settings, _, _ = two_saved
    if "data" in changes:
        changes = {"data": str(place / changes["data"])}
    before = digest(Path(settings["output"]))
    found = perform(Run({**settings, **changes}))
    assert all(name in found.error for name in named), found.error
    others = {"batch_size", "seed", "precision", "validation_share"} - set(named)
    assert not any(other in found.error for other in others), found.error
    assert "\n" not in found.error
    assert digest(Path(settings["output"])) == before


def test_a_file_that_was_changed_is_another_run(place, alone):
    """Of the same name: the order of its sequences, or the sequences, would be other ones."""
    (place / "changing.txt").write_bytes(text_of(2000))
    settings = fields(place / "changing", data="changing.txt", steps=4)
    perform(Run(settings, stop_after=2))
    (place / "changing.txt").write_bytes(text_of(3000, seed=1))
    found = perform(Run(settings))
    assert "data" in found.error


def test_what_does_not_change_the_run_may_change(two_saved):
    settings, _, four = two_saved
    other = {"steps": 20, "save_every": 7, "keep": 3, "micro_batch_size": 2, "eval_every": 3, "log_every": 2}
    found = loaded({**copied(settings, "free"), **other})
    assert found.resumed_at == 4
    assert_same_weights(found, four)


def make_newer(output: str | Path) -> int:
    path = checkpoints(output)[newest(output)] / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "format": manifest["format"] + 1}))
    return manifest["format"] + 1


def test_a_checkpoint_of_a_newer_format_is_refused(two_saved):
    """Not passed over: older ones would be gone on from, and this one overwritten."""
    settings, _, _ = two_saved
    newer = copied(settings, "newer")
    version = make_newer(newer["output"])
    before = digest(Path(newer["output"]))
    found = perform(Run(newer))
    assert "format" in found.error
    assert str(version) in found.error
    assert digest(Path(newer["output"])) == before


# -- which checkpoints are kept ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "kept"),
    [
        ({"keep": 2}, [7, 8]),
        ({"keep": 1}, [8]),
        ({"keep": 2, "keep_every": 3}, [3, 6, 7, 8]),
        ({"keep": 100}, [*range(1, 9)]),
    ],
    ids=str,
)
def test_which_checkpoints_are_kept(changes, kept, place, alone, monkeypatch):
    settings = fields(place / f"kept-{len(kept)}-{kept[0]}", save_every=1, **changes)
    fewest = []
    real = shutil.rmtree

    def watched(*args, **kwargs):
        real(*args, **kwargs)
        fewest.append(len(checkpoints(settings["output"])))

    monkeypatch.setattr(shutil, "rmtree", watched)
    assert perform(Run(settings)).code == 0
    assert sorted(checkpoints(settings["output"])) == kept
    assert min(fewest, default=100) >= min(changes["keep"], 8)


def test_a_delete_that_fails_is_a_warning(place, alone):
    settings = fields(place / "undeleted", save_every=1, keep=2)
    found = perform(Run(settings, fault="every delete"))
    assert (found.code, found.step) == (0, STEPS)
    assert "No space left on device" in found.said
    assert {7, 8} <= set(checkpoints(settings["output"]))
    assert_same(loaded(settings), found)


# -- steps that are not finite ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_too_many_bad_steps_in_a_row_end_the_run(precision, place, alone):
    """With fp16 the loss scale is halved first, which may be all that was wrong; but not for ever."""
    settings = fields(place / f"bad-{precision}", most_skipped=3, precision=precision, steps=40)
    found = perform(Run(settings, fault="nan in every step"))
    assert "3 steps" in found.error
    assert "\n" not in found.error
    assert len(losses_of(settings["output"])) == (3 if precision == "fp32" else 16 + 3)


def test_bad_steps_that_are_not_in_a_row_do_not_end_the_run(place, alone):
    found = perform(Run(fields(place / "some-bad", most_skipped=2), fault="nan in every other step"))
    assert (found.code, found.error, found.skipped) == (0, "", 4)
    assert all(bool(value.isfinite().all()) for value in found.weights.values())


# -- on ranks: everything in a few starts -----------------------------------------------------------------------------

STOPS = (1, 4, 5, 7)
BATCH = 12
"""It can be shared out among 1, 2, 3 and 4 ranks."""
SHARED = {"data": "long.txt", "batch_size": BATCH, "micro_batch_size": BATCH, "num_layers": 2}
HALFWAY = 3


def two_ranks_begin(place: Path) -> dict[str, Run]:
    runs = {}
    for parallel in PARALLEL:
        same = {"parallel": parallel, "micro_batch_size": 1}
        runs[f"{parallel} whole"] = Run(fields(place / f"{parallel}-whole", **same))
        for stop in STOPS:
            runs[f"{parallel} {stop}"] = Run(fields(place / f"{parallel}-{stop}", **same), stop_after=stop)
        one = {"parallel": parallel, "max_grad_norm": 0.0 if parallel == "fsdp" else 1.0}
        runs[f"{parallel} good"] = Run(fields(place / f"{parallel}-nan", **one), stop_after=3)
        runs[f"{parallel} evaluated"] = Run(fields(place / f"{parallel}-eval", eval_every=4, sample_tokens=5, **same))
        runs[f"{parallel} saved twice"] = Run(
            fields(place / f"{parallel}-twice", parallel=parallel, save_every=2, keep=5), stop_after=4
        )
        runs[f"{parallel} full disk"] = Run(
            fields(place / f"{parallel}-full", parallel=parallel, save_every=2, keep=5), fault="one write on rank 1"
        )
        runs[f"{parallel} shared"] = Run(fields(place / f"{parallel}-shared-2", parallel=parallel, **SHARED))
        runs[f"{parallel} odd batch"] = Run(fields(place / f"{parallel}-odd", parallel=parallel, batch_size=3))
        runs[f"{parallel} all bad"] = Run(
            fields(place / f"{parallel}-bad", parallel=parallel, most_skipped=2), fault="nan in every step"
        )
    runs["half sharded"] = Run(fields(place / "half-sharded", parallel="ddp-sharded", **SHARED), stop_after=HALFWAY)
    return runs


def two_ranks_go_on(place: Path) -> dict[str, Run]:
    runs = {}
    for parallel in PARALLEL:
        same = {"parallel": parallel, "micro_batch_size": 1}
        for stop in STOPS:
            runs[f"{parallel} {stop}"] = Run(fields(place / f"{parallel}-{stop}", **same))
        value = "inf" if parallel == "ddp" else "nan"
        one = fields(place / f"{parallel}-nan", parallel=parallel, max_grad_norm=0.0 if parallel == "fsdp" else 1.0)
        runs[f"{parallel} bad"] = Run(one, stop_after=4, fault=f"{value} in the first step on rank 1")
        runs[f"{parallel} after"] = Run(one)
        runs[f"{parallel} damaged"] = Run(
            fields(place / f"{parallel}-twice", parallel=parallel, save_every=2, keep=5), trains=False
        )
        runs[f"{parallel} refused"] = Run(fields(place / f"{parallel}-whole", **same, num_layers=2))
        runs[f"{parallel} signal"] = Run(
            fields(place / f"{parallel}-signal", parallel=parallel), fault="SIGTERM on rank 1 in step 3"
        )
        runs[f"{parallel} after signal"] = Run(fields(place / f"{parallel}-signal", parallel=parallel))
        runs[f"{parallel} no signal"] = Run(fields(place / f"{parallel}-no-signal", parallel=parallel))
        if parallel != "fsdp":
            runs[f"4 fsdp to 2 {parallel}"] = Run(fields(place / f"fsdp-to-{parallel}", parallel=parallel, **SHARED))
    runs["2 ddp-sharded to 2 fsdp"] = Run(fields(place / "half-sharded", parallel="fsdp", **SHARED))
    # The last: ranks that do not agree here leave each other alone.
    runs["newer"] = Run(fields(place / "newer-2", parallel="ddp"))
    return runs


@pytest.fixture(scope="module")
def begun(place) -> dict[str, list[Outcome]]:
    runs = two_ranks_begin(place)
    by_rank = spawn(play, 2, runs, timeout=LIMIT)
    return {name: [found[name] for found in by_rank] for name in runs}


@pytest.fixture(scope="module")
def four_ranks(place) -> dict[str, list[Outcome]]:
    runs = {
        "fsdp shared": Run(fields(place / "fsdp-shared-4", parallel="fsdp", **SHARED)),
        "ddp shared": Run(fields(place / "ddp-shared-4", parallel="ddp", **SHARED)),
        "half": Run(fields(place / "half-fsdp-4", parallel="fsdp", **SHARED), stop_after=HALFWAY),
    }
    by_rank = spawn(play, 4, runs, timeout=LIMIT)
    return {name: [found[name] for found in by_rank] for name in runs}


@pytest.fixture(scope="module")
def gone_on(begun, four_ranks, place) -> dict[str, list[Outcome]]:
    """New processes, which find what the ranks of before have left; one file of the newest checkpoint is damaged."""
    for parallel in PARALLEL:
        last = checkpoints(place / f"{parallel}-twice")[4]
        flip(sorted(path for path in last.rglob("*") if path.is_file() and path.suffix == ".distcp")[-1])
        shutil.copytree(place / "half-fsdp-4", place / f"fsdp-to-{parallel}")
    shutil.copytree(place / "ddp-whole", place / "newer-2")
    make_newer(place / "newer-2")
    shutil.copytree(place / "half-fsdp-4", place / "fsdp-to-none")
    shutil.copytree(place / "half-sharded", place / "sharded-to-none")
    runs = two_ranks_go_on(place)
    by_rank = spawn(play, 2, runs, timeout=LIMIT)
    return {name: [found[name] for found in by_rank] for name in runs}


every_parallel = pytest.mark.parametrize("parallel", PARALLEL)


@every_parallel
def test_evaluations_change_nothing_on_ranks(parallel, begun, place):
    for rank in (0, 1):
        assert_same(begun[f"{parallel} evaluated"][rank], begun[f"{parallel} whole"][rank])
    assert losses_of(place / f"{parallel}-eval") == losses_of(place / f"{parallel}-whole")
    assert "The " in begun[f"{parallel} evaluated"][0].said
    assert begun[f"{parallel} evaluated"][1].said == ""


@every_parallel
def test_bad_steps_end_all_ranks(parallel, begun):
    for outcome in begun[f"{parallel} all bad"]:
        assert "2" in outcome.error


@every_parallel
def test_a_disk_that_is_full_for_one_rank(parallel, begun, place):
    """Of the first of four saves nothing is left; the others are whole, and the run is as it would have been."""
    found = begun[f"{parallel} full disk"]
    output = place / f"{parallel}-full"
    assert [(outcome.crash, outcome.code, outcome.step) for outcome in found] == [("", 0, STEPS)] * 2
    assert "No space left on device" in found[0].said + found[1].said
    assert sorted(checkpoints(output)) == [4, 6, 8]
    assert leftovers(output) == []


@pytest.fixture(scope="module")
def alone_shared(place, alone) -> Outcome:
    return perform(Run(fields(place / "none-shared-1", **SHARED)))


def test_the_number_of_ranks_does_not_change_the_run(begun, four_ranks, alone_shared, place):
    expected = losses_of(place / "none-shared-1")
    assert len(expected) == STEPS
    assert expected[-1] < expected[0] - 0.3
    for world_size, parallels, found in ((2, PARALLEL, begun), (4, ("ddp", "fsdp"), four_ranks)):
        for parallel in parallels:
            assert losses_of(place / f"{parallel}-shared-{world_size}") == pytest.approx(expected, abs=1e-5), parallel
            for outcome in found[f"{parallel} shared"]:
                assert_same_weights(outcome, alone_shared, 1e-5)


@every_parallel
def test_stopped_at_any_step_and_gone_on_in_new_processes(parallel, begun, gone_on, place):
    """As if it had not been: with accumulation, and an epoch that ends within the fifth step."""
    whole = begun[f"{parallel} whole"]
    assert [found.code for found in whole] == [0, 0]
    assert_same_weights(whole[1], whole[0])
    losses = losses_of(place / f"{parallel}-whole")
    assert len(losses) == STEPS
    for stop in STOPS:
        for rank in (0, 1):
            before, after = begun[f"{parallel} {stop}"][rank], gone_on[f"{parallel} {stop}"][rank]
            assert (before.code, before.step, after.resumed_at, after.code) == (STOPPED, stop, stop, 0)
            assert_same(after, whole[rank])
        assert losses_of(place / f"{parallel}-{stop}") == losses


def test_saved_on_four_ranks_resumed_on_other_numbers(four_ranks, gone_on, alone_shared, alone, place):
    """And from one way to share the work to another."""
    assert newest(place / "half-fsdp-4") == HALFWAY
    three = spawn(play, 3, {"": Run(fields(place / "fsdp-to-fsdp", parallel="fsdp", **SHARED))}, timeout=LIMIT)
    outcomes = {
        "fsdp-to-fsdp": [found[""] for found in three],
        "fsdp-to-ddp": gone_on["4 fsdp to 2 ddp"],
        "fsdp-to-ddp-sharded": gone_on["4 fsdp to 2 ddp-sharded"],
        "half-sharded": gone_on["2 ddp-sharded to 2 fsdp"],
        "fsdp-to-none": [perform(Run(fields(place / "fsdp-to-none", **SHARED)))],
        "sharded-to-none": [perform(Run(fields(place / "sharded-to-none", **SHARED)))],
    }
    never_changed = losses_of(place / "fsdp-shared-4")
    for name, found in outcomes.items():
        assert losses_of(place / name) == pytest.approx(never_changed, abs=1e-5), name
        for outcome in found:
            assert (outcome.code, outcome.resumed_at, outcome.step) == (0, HALFWAY, STEPS)
            assert_same_weights(outcome, four_ranks["fsdp shared"][0], 1e-5)


@every_parallel
def test_a_gradient_that_is_not_finite_on_one_rank(parallel, begun, gone_on, place):
    """All ranks leave out the step, whoever holds the bad row, with clipping or without; then they go on."""
    for rank in (0, 1):
        good, bad, after = (
            found[rank]
            for found in (begun[f"{parallel} good"], gone_on[f"{parallel} bad"], gone_on[f"{parallel} after"])
        )
        assert (bad.resumed_at, bad.step, bad.skipped) == (3, 4, 1)
        assert_same_weights(bad, good)
        assert all(torch.equal(one, other) for one, other in zip(bad.states, good.states, strict=True))
        assert (after.code, after.step, after.skipped) == (0, STEPS, 1)
        assert all(bool(value.isfinite().all()) for value in after.weights.values())
        assert any(not torch.equal(value, bad.weights[name]) for name, value in after.weights.items())
        assert_same_weights(after, gone_on[f"{parallel} after"][0])
    norms = list(recorded(place / f"{parallel}-nan", "gradient_norm").values())
    assert [math.isfinite(norm) for norm in norms] == [True] * 3 + [False] + [True] * 4


@every_parallel
def test_a_shard_that_is_damaged_is_not_loaded_on_any_rank(parallel, gone_on):
    found = gone_on[f"{parallel} damaged"]
    assert [outcome.resumed_at for outcome in found] == [2, 2]
    assert "step-00000004" in found[0].said
    assert ".distcp" in found[0].said
    assert_same_weights(found[1], found[0])


@every_parallel
def test_refusals_on_ranks(parallel, begun, gone_on):
    for outcome in begun[f"{parallel} odd batch"]:
        assert "batch_size 3" in outcome.error
    for outcome in gone_on[f"{parallel} refused"]:
        assert "num_layers" in outcome.error


def test_a_newer_format_is_refused_by_all_ranks(gone_on):
    """Not by rank 0 alone, which leaves the others waiting for its word."""
    for outcome in gone_on["newer"]:
        assert outcome.crash == ""
        assert "format" in outcome.error


@every_parallel
def test_a_signal_to_one_rank_stops_all_in_the_same_step(parallel, gone_on, place):
    found = gone_on[f"{parallel} signal"]
    assert [outcome.code for outcome in found] == [STOPPED] * 2
    assert found[0].step == found[1].step == 3
    for rank in (0, 1):
        assert gone_on[f"{parallel} after signal"][rank].resumed_at == 3
        assert_same(gone_on[f"{parallel} after signal"][rank], gone_on[f"{parallel} no signal"][rank])
    assert losses_of(place / f"{parallel}-signal") == losses_of(place / f"{parallel}-no-signal")


# -- the command ------------------------------------------------------------------------------------------------------


def argv_of(run_fields: dict) -> list[str]:
    return ["train", *(word for name, value in run_fields.items() for word in (f"--{name}", str(value)))]


class Command:
    """`cs336 train` in a process that has torch already: it is there in a moment, and can be killed at any."""

    def __init__(self, run_fields: dict, folder: Path, cwd: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["cs336_systems.cli", "cs336_systems.train.loop"])
        self.process = context.Process(target=command, args=(argv_of(run_fields), str(folder), str(cwd)), daemon=True)
        self.process.start()

    @property
    def ended(self) -> bool:
        return self.process.exitcode is not None

    def wait(self) -> int:
        self.process.join(60)
        assert self.ended, "the command does not end"
        return self.process.exitcode

    def said(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def start(tmp_path, monkeypatch):
    for name, value in CPU_ONLY.items():
        monkeypatch.setenv(name, value)
    with contextlib.ExitStack() as stack:

        def begin(run_fields: dict, name: str = "said", cwd: Path = tmp_path) -> Command:
            made = Command(run_fields, tmp_path / name, cwd)
            stack.callback(made.process.join, 10)
            stack.callback(made.process.kill)
            return made

        yield begin


def test_stopped_by_signals_and_gone_on(start, place, alone, tmp_path):
    """The command by SIGTERM, then by Ctrl-C; then to the end. It is the run that nobody has stopped."""
    settings = fields(place / "signals", data="long.txt", steps=200, save_every=25)
    output = settings["output"]
    with running([sys.executable, "-m", "cs336_systems", *argv_of(settings)], tmp_path) as marked:
        assert wait_until(lambda: newest(output) or marked.ended, 60), marked.log.read_text()
        marked.process.send_signal(signal.SIGTERM)
        assert marked.process.wait(timeout=20) == STOPPED, marked.log.read_text()
    stopped = newest(output)
    assert 25 <= stopped < 200
    assert len(losses_of(output)) == stopped  # the step was ended, recorded and saved
    assert leftovers(output) == []

    second = start(settings)
    assert wait_until(lambda: newest(output) > stopped or second.ended, 60)
    os.kill(second.process.pid, signal.SIGINT)
    assert second.wait() == STOPPED, second.said("stderr")
    assert "Traceback" not in second.said("stderr")
    assert stopped < newest(output) < 200
    assert len(losses_of(output)) == newest(output)

    assert start(settings).wait() == 0
    whole = fields(place / "no-signals", data="long.txt", steps=200)
    expected = perform(Run(whole))
    assert_same(loaded(settings), expected)
    assert losses_of(output) == losses_of(whole["output"])

    before = digest(Path(output))
    finished = start(settings)
    assert finished.wait() == 0
    assert digest(Path(output)) == before
    assert finished.said("stdout") + finished.said("stderr") != ""


def test_killed_at_any_moment(start, place, alone):
    """While it saves in every step: what is there can be gone on from, and nothing but the last step is lost."""
    settings = fields(place / "killed", steps=60, save_every=1, parallel="ddp")
    output = settings["output"]
    chance = random.Random(0)
    for _ in range(7):
        before = newest(output)
        killed = start(settings)
        assert wait_until(lambda before=before, killed=killed: newest(output) > before or killed.ended, 60)
        time.sleep(chance.uniform(0, 0.12))
        killed.process.kill()
        assert killed.wait() == -signal.SIGKILL, killed.said("stderr")
        assert newest(output) > before
        found = loaded(copied(settings, "killed-copy"))
        assert found.resumed_at == newest(output)
        assert "step-" not in killed.said("stderr")  # nothing was found damaged
        assert leftovers(place / "killed-copy") == []
    last = start(settings)
    assert last.wait() == 0, last.said("stderr")
    whole = fields(place / "unkilled", steps=60, parallel="ddp")
    expected = perform(Run(whole))
    assert_same(loaded(settings), expected)
    steps = recorded(output, "loss")
    assert list(steps.items())[-5:] == list(recorded(whole["output"], "loss").items())[-5:]
    assert leftovers(output) == []


def test_two_commands_in_one_folder(start, place):
    settings = fields(place / "twice", data="long.txt", steps=100_000, save_every=20)
    output = Path(settings["output"])
    holder = start(settings, "holder")
    assert wait_until(lambda: newest(output) > 0 or holder.ended, 60)
    second = start(settings, "second")
    assert second.wait() == 2
    assert not holder.ended
    assert second.said("stdout") == ""
    assert second.said("stderr").count("\n") == 1
    assert str(output) in second.said("stderr")
    os.kill(holder.process.pid, signal.SIGTERM)
    assert holder.wait() == STOPPED, holder.said("stderr")
    assert len(losses_of(output)) == newest(output)
    ending = newest(output) + 5
    assert start({**settings, "steps": ending}).wait() == 0
    assert newest(output) == ending


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"data": None}, "--data"),
        ({"data": "missing.txt"}, "'missing.txt'"),
        ({"data": "tiny.txt"}, "tiny.txt"),
        ({"data": "empty.txt"}, "empty.txt"),
        ({"data": "flat.npy"}, "flat.npy"),
        ({"vocab_size": 100}, "100"),
        ({"output": "in-the-way.txt"}, "in-the-way.txt"),
        ({"output": "in-the-way.txt/below"}, "in-the-way.txt/below"),
        ({"parallel": "magic"}, "'magic'"),
        ({"precision": "fp7"}, "'fp7'"),
        ({"attention": "vague"}, "'vague'"),
        ({"device": "tpu"}, "'tpu'"),
        ({"steps": 0}, "steps"),
        ({"micro_batch_size": 3}, "micro_batch_size 3"),
        ({"attention": "flash_triton"}, "flash_triton"),
    ],
    ids=str,
)
def test_mistakes_on_the_command_line(changes, named, start, tmp_path):
    """One line, exit code 2, nothing written."""
    folder = tmp_path / "user"
    folder.mkdir()
    (folder / "text.txt").write_bytes(text_of(1000))
    (folder / "tiny.txt").write_bytes(b"too short")
    (folder / "empty.txt").write_bytes(b"")
    (folder / "in-the-way.txt").write_bytes(b"in the way")
    np.save(folder / "flat.npy", np.zeros((100, 100), int))
    before = digest(folder)
    asked = {**fields(folder / "output", data="text.txt"), "output": "output", **changes}
    refused = start({name: value for name, value in asked.items() if value is not None}, cwd=folder)
    assert refused.wait() == 2, refused.said("stderr")
    assert refused.said("stdout") == ""
    assert refused.said("stderr").count("\n") == 1, refused.said("stderr")
    assert named in refused.said("stderr")
    assert digest(folder) == before
    assert not (folder / "output").exists()


def test_under_torchrun(begun, place, tmp_path):
    settings = fields(place / "torchrun", parallel="ddp", micro_batch_size=1)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    done = execute(*torchrun, "-m", "cs336_systems", *argv_of(settings), cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert newest(settings["output"]) == STEPS
    assert losses_of(settings["output"]) == losses_of(place / "ddp-whole")


@pytest.mark.parametrize(("number", "seconds"), [(signal.SIGKILL, 5), (signal.SIGSTOP, 3 + 5)], ids=["dies", "stalls"])
def test_a_rank_that_is_gone_is_named(number, seconds, place, tmp_path):
    """By the others, within the time they wait for it and five seconds. No torchrun is there to end them."""
    settings = fields(place / f"gone-{number}", parallel="ddp", batch_size=3, steps=100_000, rank_timeout=3)
    with contextlib.ExitStack() as stack:
        ranks = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
        for rank in range(3):
            whole = {"TORCHELASTIC_RUN_ID": "test", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3", **meeting}
            process = subprocess.Popen(
                [sys.executable, "-m", "cs336_systems", *argv_of(settings)],
                cwd=tmp_path,
                env=clean_env(RANK=str(rank), LOCAL_RANK=str(rank), **whole),
                stdout=stack.enter_context((tmp_path / f"out-{rank}").open("w")),
                stderr=stack.enter_context((tmp_path / f"err-{rank}").open("w")),
            )
            stack.callback(process.wait, 10)
            stack.callback(process.kill)
            ranks.append(process)
        assert wait_until(lambda: "step 3/" in (tmp_path / "out-0").read_text(), 100), (tmp_path / "err-0").read_text()
        ranks[1].send_signal(number)
        begin = time.monotonic()
        for rank in (0, 2):
            assert ranks[rank].wait(timeout=30) == 1
            assert "rank 1 of 3 died or does not answer" in (tmp_path / f"err-{rank}").read_text()
            assert "Traceback" not in (tmp_path / f"err-{rank}").read_text()
        assert time.monotonic() - begin < seconds + 5  # a busy machine's share


def test_no_record_is_lost_when_it_is_killed_after_a_save(place, alone, tmp_path):
    settings = fields(tmp_path / "unlogged", data=str(place / "short.txt"), log_every=3, save_every=2)
    perform(Run(settings, stop_after=2))
    assert len(losses_of(settings["output"])) == 2  # step 3 would have written them


def test_a_reader_that_has_gone_does_not_end_the_training(place, tmp_path):
    settings = fields(place / "piped", data="short.txt")
    command = " ".join([sys.executable, "-m", "cs336_systems", *argv_of(settings)])
    done = execute("bash", "-c", f"set -o pipefail; {command} | head -n 1", cwd=tmp_path, timeout=100)
    assert done.returncode == 0, done.stderr
    assert newest(settings["output"]) == STEPS
