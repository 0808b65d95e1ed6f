"""The families of models load files of transformers, compute the same, and peft loads ours."""

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import pytreemod as pm
from pytreemod import nn
from tests.helpers.examples import example

pytestmark = pytest.mark.slow

NEEDED = ("transformers", "peft", "torch", "safetensors")
ABSENT = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_hub = pytest.mark.skipif(
    bool(ABSENT), reason=f"a folder is written by transformers; absent: {', '.join(ABSENT)}"
)
PROGRAM = Path(__file__).parents[1] / "helpers" / "hub_models.py"
FAMILIES = ("llama", "gpt2", "vit", "resnet")
LANGUAGE = ["llama", "llama-tied", "gpt2"]
IMAGES = ["vit", "resnet", "resnet-basic"]
EXACT = 1e-4
"""The largest difference of scores in float32, whose spread is about 1."""
HALF = 0.05
"""The root mean square of the differences in bfloat16, by that of the scores."""


class Hub:
    """The process that has transformers, and the folders that it has written."""

    def __init__(self, folder, process):
        self.folder, self.process = folder, process

    def wait_for(self, word):
        """Until the process has said a word."""
        line = self.process.stdout.readline()
        if line.strip() != word:
            # Its message is on our stderr, which pytest shows.
            pytest.fail(f"{PROGRAM.name} ended with {self.process.wait()}, and said {line!r}")

    def scores_with(self, base, adapter):
        """Those of a model with an adapter of peft."""
        self.process.stdin.write(f"{self.folder / base}\t{adapter}\n")
        self.process.stdin.flush()
        self.wait_for("done")
        return np.load(adapter / "scores.npy")

    def expected(self, name):
        """The input of a model, and its output."""
        return np.load(self.folder / name / "expected.npz")


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    """All folders, written by one process, which goes on until the tests are through."""
    folder = tmp_path_factory.mktemp("hub")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, PROGRAM, folder], **pipes) as process:
        found = Hub(folder, process)
        found.wait_for("ready")
        yield found
        process.stdin.close()


@pytest.fixture(scope="module")
def programs():
    """The examples, by name."""
    with (
        example("llama") as llama,
        example("gpt2") as gpt2,
        example("vit") as vit,
        example("resnet") as resnet,
    ):
        yield {"llama": llama, "gpt2": gpt2, "vit": vit, "resnet": resnet}


def read(programs, folder, dtype=None):
    """The model, its State if it has one, and the function that gives the scores."""
    family = folder.name.partition("-")[0]
    program = programs[family]
    if family in ("llama", "gpt2"):
        model, state = program.read(folder, dtype)
    elif family == "vit":
        model, state = program.read(folder, dtype)[0], None
    else:
        model, state, _ = program.read(folder, dtype)
        model = pm.inference_mode(model)
    call = pm.filter_jit(model)
    score = (lambda x: call(x, state)[0]) if family == "resnet" else call
    return model, state, score


@needs_hub
@pytest.mark.parametrize("name", LANGUAGE + IMAGES)
def test_scores_are_those_of_transformers(hub, programs, name):
    """In float32 and in bfloat16; the generated text is the same, token for token."""
    expected = hub.expected(name)
    model, state, score = read(programs, hub.folder / name)
    given = jnp.asarray(expected["given"])

    np.testing.assert_allclose(score(given), expected["scores"], rtol=0, atol=EXACT)
    if name in LANGUAGE:
        program = programs[name.partition("-")[0]]
        written, _ = program.generate(model, state, given, expected["written"].shape[1])
        np.testing.assert_array_equal(written, expected["written"])
    if name not in FAMILIES:
        return
    model, _, score = read(programs, hub.folder / name, "bfloat16")
    given = given if name in LANGUAGE else given.astype(jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype("bfloat16")}
    half = np.asarray(score(given).astype(jnp.float32))
    assert rms(half - expected["scores"]) < HALF * rms(expected["scores"])
    assert rms(half - expected["half"]) < HALF * rms(expected["scores"])


def rms(x):
    """The root mean square."""
    return float(np.sqrt(np.mean(x**2)))


def arrays_in(folder):
    """All arrays of a folder, as safetensors reads them."""
    from safetensors.numpy import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: array for file in files for name, array in load_file(file).items()}


@needs_hub
@pytest.mark.parametrize("name", ["llama", "llama-tied", "resnet", "resnet-basic"])
def test_a_table_of_names_serves_both_directions(hub, programs, tmp_path, name):
    """A file written with it equals that of transformers, array for array."""
    model, state, _ = read(programs, hub.folder / name)
    names = dict(programs[name.partition("-")[0]].NAMES)
    if name == "llama-tied":
        del names["lm_head.weight"]
    back = {ours: theirs for theirs, ours in names.items() if ours is not None}
    tree = (model, state) if "resnet" in name else model
    pm.save(tmp_path / "model.safetensors", tree, rename=back)
    wanted = arrays_in(hub.folder / name)
    found = arrays_in(tmp_path)

    assert {*found} == {theirs for theirs in wanted if "num_batches" not in theirs}
    for theirs, array in found.items():
        np.testing.assert_array_equal(array, wanted[theirs], err_msg=theirs)


PEFT = {
    f"layers.*.attention.{ours}_proj.weight.{part}": "base_model.model.model.layers.*.self_attn."
    f"{theirs}_proj.lora_{part.upper()}.weight"
    for ours, theirs in {"query": "q", "value": "v"}.items()
    for part in "ab"
}


@needs_hub
def test_peft_reads_what_was_fine_tuned(hub, programs, tmp_path):
    """As `docs/how-to/fine-tune-with-lora.md` writes it: the scores are the same."""
    model, _, _ = read(programs, hub.folder / "llama")
    given = jnp.asarray(hub.expected("llama")["given"])
    chosen = pm.select.path("**.query_proj.weight") | pm.select.path("**.value_proj.weight")
    model = pm.lora(model, chosen, rank=2, alpha=8, key=jax.random.key(0))
    wrt = pm.select.role("lora")
    optimizer = optax.adam(0.03)
    opt_state = optimizer.init(pm.trainable(model, wrt)[0])

    def loss_fn(model):
        scores = model(given[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(scores, given[:, 1:]).mean()

    @pm.filter_jit
    def step(model, opt_state):
        loss, grads = pm.filter_value_and_grad(loss_fn, wrt=wrt)(model)
        updates, opt_state = optimizer.update(grads, opt_state, pm.trainable(model, wrt)[0])
        return pm.apply_updates(model, updates), opt_state, loss

    losses = []
    for _ in range(5):
        model, opt_state, loss = step(model, opt_state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.1

    added, _ = pm.partition(model, wrt)
    pm.save(tmp_path / "adapter_model.safetensors", added, rename=PEFT)
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8}
    config["target_modules"] = ["q_proj", "v_proj"]
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    scores = pm.filter_jit(model)(given)
    assert np.abs(scores - hub.expected("llama")["scores"]).max() > 0.1
    np.testing.assert_allclose(scores, hub.scores_with("llama", tmp_path), rtol=0, atol=EXACT)


def by_hand(model, token, caches):
    """A step of decoding by Llama, written with JAX alone."""
    keys, values, seen = caches
    layer, rope = model.layers.layer, model.layers.layer.attention.rotary
    attention, size = layer.attention, rope.embedding_size
    rate = rope.theta ** -(jnp.arange(0, size, 2) / size)
    cos, sin = (jnp.tile(f(seen[:, None] * rate), 2)[:, None] for f in (jnp.cos, jnp.sin))

    def normed(x, weight):
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * weight

    def turned(x):
        first, second = jnp.split(x, 2, -1)
        return x * cos + jnp.concatenate([-second, first], -1) * sin

    def put(cache, new):
        return jax.vmap(lambda old, x, i: jax.lax.dynamic_update_slice(old, x[:, None], (0, i, 0)))(
            cache, new, seen
        )

    def step(x, of):
        one, two, query, key, value, out, gate, up, down, keys, values = of
        rows, groups = len(x), keys.shape[1]
        q, k, v = (normed(x, one) @ w.T for w in (query, key, value))
        q, k = (turned(y.reshape(rows, -1, size)) for y in (q, k))
        keys, values = put(keys, k), put(values, v.reshape(rows, groups, size))
        q = q.reshape(rows, groups, -1, size)
        scores = jnp.einsum("bkgd,bksd->bkgs", q, keys) / np.sqrt(size)
        sees = jnp.arange(keys.shape[2]) <= seen[:, None]
        weights = jax.nn.softmax(jnp.where(sees[:, None, None], scores, -jnp.inf), -1)
        x = x + jnp.einsum("bkgs,bksd->bkgd", weights, values).reshape(rows, -1) @ out.T
        y = normed(x, two)
        return x + (jax.nn.silu(y @ gate.T) * (y @ up.T)) @ down.T, (keys, values)

    projections = [getattr(attention, f"{x}_proj") for x in ("query", "key", "value", "output")]
    maps = [*projections, layer.gate_proj, layer.up_proj, layer.down_proj]
    of = (*(norm.weight for norm in layer.norms), *(x.weight for x in maps), keys, values)
    x, (keys, values) = jax.lax.scan(step, model.embed.weight[token], of)
    scores = normed(x, model.norm.weight) @ model.head.weight.T
    return scores.argmax(-1), (keys, values, seen + 1)


def operations(compiled):
    """How many operations a compiled program has, those that are fused counted as one."""
    text = compiled.as_text()
    bodies = re.findall(r"^(?:ENTRY )?(%\S+) \(.*?\{$(.*?)^\}", text, re.M | re.S)
    free = {"parameter", "constant", "bitcast", "get-tuple-element", "tuple"}
    found = [
        op
        for name, body in bodies
        if "fused" not in name
        for op in re.findall(r"= \S+ ([a-z\-]+)\(", body)
    ]
    return len([op for op in found if op not in free])


@pytest.mark.usefixtures("optimized")
def test_a_step_of_decoding_has_the_operations_of_one_by_hand(programs):
    """As many, within a tenth; and it finds the same tokens."""
    program = programs["llama"]
    make = pm.make_with_state(program.Llama)
    model, state = make(program.SMALL, key=jax.random.key(0))
    state = nn.reset_cache(model, state, batch=2, size=16)
    caches = (jnp.zeros((3, 2, 2, 16, 16)), jnp.zeros((3, 2, 2, 16, 16)), jnp.zeros(2, int))
    token = jnp.array([3, 5])

    def step(model, token, state):
        scores, state = model(token[:, None], state)
        return scores[:, -1].argmax(-1), state

    one_step = jax.jit(step).lower(model, token, state).compile()
    by_hand_too = jax.jit(by_hand).lower(model, token, caches).compile()
    ours, theirs = operations(one_step), operations(by_hand_too)
    assert theirs > 50
    assert ours <= 1.1 * theirs, f"{ours} operations, and {theirs} by hand"
    one = other = token
    for _ in range(3):
        one, state = one_step(model, one, state)
        other, caches = by_hand_too(model, other, caches)
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_a_program_runs_alone(programs, capsys, name):
    """On random numbers; it prints its results."""
    options = {"llama": ["--count", "3", "--quantize", "int8"], "gpt2": ["--count", "3"]}
    programs[name].main(options.get(name, []))
    printed = capsys.readouterr().out

    assert re.search(r"^3 1 4 1 5 ->( \d+){3}$" if name in options else "^image 0: ", printed, re.M)
    if name == "llama":
        # Its bytes, and how far its scores are off.
        assert "575,232 bytes before" in printed
        assert 0 < float(re.search("scores differ by ([0-9.]+)", printed)[1]) < 0.05
