"""New weights and adapters in the embedded server, against plain forwards of the same weights."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from serving import assert_logprobs, call, generate, prompt_of, together

PROMPT = prompt_of(3, 11)


def manifest(folder, drop=()):
    tensors = {n: t for n, t in load_file(f"{folder}/model.safetensors").items() if n not in drop}
    return {
        "names": list(tensors),
        "dtype_names": [str(t.dtype).removeprefix("torch.") for t in tensors.values()],
        "shapes": [list(t.shape) for t in tensors.values()],
    }


def connect(url, folder):
    assert call(url, "/init_weight_transfer_engine", {"init_info": {"folder": folder}})[0] == 200
    assert call(url, "/start_weight_update", {})[0] == 200


def assert_serves(url, name, plain, model=None):
    choice = generate(url, PROMPT, model=model, max_tokens=13, logprobs=3, seed=5, ignore_eos=True)
    assert_logprobs(choice, plain(name, PROMPT + choice["token_ids"]), len(PROMPT))
    return choice


def test_a_transfer_replaces_the_weights_tied_embeddings_included(fresh, folders, plain):
    assert assert_serves(fresh.url, "qwen3", plain)["weight_versions"] == [{"version": "default", "start": 0, "end": 13}]
    connect(fresh.url, folders["other"])
    info = manifest(folders["other"])
    halves = [{k: v[i::2] for k, v in info.items()} for i in range(2)]
    for half in halves:
        status, answer = call(fresh.url, "/update_weights", {"update_info": half})
        assert status == 200 and answer["num_tensors"] == len(half["names"])
    assert call(fresh.url, "/finish_weight_update", {"weight_version": "17"})[0] == 200
    choice = assert_serves(fresh.url, "other", plain)
    assert choice["weight_versions"] == [{"version": "17", "start": 0, "end": 13}]
    assert call(fresh.url, "/weight_info")[1] == {"weight_version": "17", "num_updates": 1, "is_partial": False}


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda i: i["names"].__setitem__(3, "model.layers.9.mlp.up_proj.weight"), "model.layers.9.mlp.up_proj.weight"),
        (lambda i: i["shapes"].__setitem__(0, [97, 41]), "has shape [97, 41], the model expects [97, 42]"),
        (lambda i: i["names"].pop(), "names but"),
    ],
)
def test_a_wrong_manifest_is_refused_before_anything_changes(change, text, fresh, folders, plain):
    connect(fresh.url, folders["other"])
    info = manifest(folders["other"])
    info = {k: sorted_first(v, info["names"]) for k, v in info.items()}
    change(info)
    status, answer = call(fresh.url, "/update_weights", {"update_info": info})
    assert status == 400 and text in answer["error"]["message"]
    assert call(fresh.url, "/finish_weight_update", {})[0] == 400
    assert_serves(fresh.url, "qwen3", plain)


def sorted_first(values, names):
    """The embedding first, so that index 0 has a known shape."""
    first = names.index("model.embed_tokens.weight")
    return [values[first], *values[:first], *values[first + 1 :]]


def test_half_loaded_weights_are_never_finished(fresh, folders, plain):
    url, info = fresh.url, manifest(folders["other"])
    call(url, "/update_weight_version", {"new_version": "3"})
    connect(url, folders["other"])
    status, answer = call(url, "/update_weights", {"update_info": info | {"fail_after": 5}})
    assert status == 500 and "the sender went away" in answer["error"]["message"]
    status, answer = call(url, "/finish_weight_update", {"weight_version": "4"})
    assert status == 400 and "partial" in answer["error"]["message"]
    assert call(url, "/weight_info")[1] == {"weight_version": None, "num_updates": 0, "is_partial": True}
    assert call(url, "/update_weights", {"update_info": info})[0] == 400  # needs a new start
    call(url, "/start_weight_update", {})
    missing = "model.layers.1.mlp.up_proj.weight"
    assert call(url, "/update_weights", {"update_info": manifest(folders["other"], drop={missing})})[0] == 200
    status, answer = call(url, "/finish_weight_update", {"weight_version": "4"})
    assert status == 400 and missing in answer["error"]["message"]
    call(url, "/start_weight_update", {})
    assert call(url, "/update_weights", {"update_info": info})[0] == 200
    assert call(url, "/finish_weight_update", {"weight_version": "4"})[0] == 200
    assert assert_serves(url, "other", plain)["weight_versions"][0]["version"] == "4"


def test_reload_from_a_folder_checks_it_first(fresh, folders, plain, tmp_path):
    def reload(folder):
        return call(fresh.url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})

    status, answer = reload(tmp_path)
    assert status == 400 and "no model.safetensors" in answer["error"]["message"]
    status, answer = reload(folders["llama"])
    assert status == 400 and "lacks model.layers.0.self_attn.q_norm.weight" in answer["error"]["message"]
    assert_serves(fresh.url, "qwen3", plain)
    tensors = load_file(f"{folders['other']}/model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, part in shards.items():
        save_file({n: tensors[n] for n in part}, tmp_path / file)
    weight_map = {n: file for file, part in shards.items() for n in part}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert reload(tmp_path)[0] == 200
    assert_serves(fresh.url, "other", plain)


def test_weights_that_are_not_finite_are_an_error_and_leave_no_trace(fresh, folders, plain, tmp_path):
    """NaN in a slot would reach its next owner, through a masked weight of 0."""
    tensors = load_file(f"{folders['other']}/model.safetensors")
    tensors["model.layers.1.self_attn.v_proj.weight"][3, 5] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    for folder in (str(tmp_path), folders["other"]):
        answer = call(fresh.url, "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}})
        assert answer[0] == 200
        if folder == str(tmp_path):
            answers = together([lambda: call(fresh.url, "/inference/v1/generate", {"token_ids": PROMPT})] * 3)
            assert {(status, a["error"]["message"]) for status, a in answers} == {
                (500, "the model's logits are not finite")
            }
    assert_serves(fresh.url, "other", plain)


def make_adapter(folder, base, seed, modules, rank=3, alpha=5.0, **config):
    """A PEFT folder with random A and B, and a model folder with the same adapter merged."""
    generator = torch.Generator().manual_seed(seed)
    merged, tensors = load_file(f"{base}/model.safetensors"), {}
    for name in [n for n in merged if any(f".{m}.weight" in n for m in modules)]:
        out, into = merged[name].shape
        a, b = torch.randn(rank, into, generator=generator) * 0.2, torch.randn(out, rank, generator=generator) * 0.2
        prefix = "base_model.model." + name.removesuffix(".weight")
        tensors |= {f"{prefix}.lora_A.weight": a, f"{prefix}.lora_B.weight": b}
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        merged[name] = merged[name] + scale * (b @ a)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": list(modules), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(settings | config))
    together_folder = folder.with_name(folder.name + "-merged")
    together_folder.mkdir()
    save_file(merged, together_folder / "model.safetensors", metadata={"format": "pt"})
    (together_folder / "config.json").write_text(open(f"{base}/config.json").read())
    return str(folder), str(together_folder)


def load(url, name, path, **body):
    return call(url, "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path, **body})


def test_adapters_equal_merged_weights_beside_each_other(fresh, folders, plain, tmp_path):
    url = fresh.url
    first, first_merged = make_adapter(tmp_path / "a", folders["qwen3"], 1, ["q_proj", "down_proj"])
    second, second_merged = make_adapter(
        tmp_path / "b", folders["qwen3"], 2, ["v_proj", "up_proj"], rank=7, use_rslora=True
    )
    assert load(url, "one", first)[0] == 200 and load(url, "two", second)[0] == 200
    models = call(url, "/v1/models")[1]["data"]
    assert [(m["id"], m["parent"]) for m in models[1:]] == [("one", models[0]["id"]), ("two", models[0]["id"])]
    expected = {"one": first_merged, "two": second_merged, None: "qwen3"}
    asked = ["one", None, "two", "one", "two", None, "one"]
    choices = together(
        [
            lambda m=m, i=i: generate(url, PROMPT, model=m, max_tokens=17 + 7 * i, logprobs=3, seed=i, ignore_eos=True)
            for i, m in enumerate(asked)
        ]
    )
    for model, choice in zip(asked, choices, strict=True):
        assert_logprobs(choice, plain(expected[model], PROMPT + choice["token_ids"]), len(PROMPT))
    assert call(url, "/v1/unload_lora_adapter", {"lora_name": "one"})[0] == 200
    assert call(url, "/inference/v1/generate", {"token_ids": [7], "model": "one"})[0] == 404
    assert_serves(url, second_merged, plain, model="two")


def test_adapters_that_cannot_be_served_are_refused(fresh, folders, tmp_path):
    url = fresh.url
    good, _ = make_adapter(tmp_path / "good", folders["qwen3"], 1, ["q_proj"])
    cases = {
        "dora": ({"use_dora": True}, "DoRA"),
        "bias": ({"bias": "all"}, "trained bias"),
        "rank": ({"r": 65}, "rank 65 is greater than max_lora_rank 64"),
        "kind": ({"peft_type": "IA3"}, "IA3"),
    }
    for name, (config, text) in cases.items():
        path, _ = make_adapter(tmp_path / name, folders["qwen3"], 1, ["q_proj"], **config)
        status, answer = load(url, name, path)
        assert status == 400 and text in answer["error"]["message"]
    path, _ = make_adapter(tmp_path / "wrong", folders["llama"], 1, ["q_proj"])
    tensors = load_file(f"{path}/adapter_model.safetensors")
    save_file({k.replace("layers.2", "layers.9"): v for k, v in tensors.items()}, f"{path}/adapter_model.safetensors")
    assert "model.layers.9.self_attn.q_proj" in load(url, "wrong", path)[1]["error"]["message"]
    assert "adapter_config.json" in load(url, "none", str(tmp_path / "none"))[1]["error"]["message"]
    assert load(url, "good", good)[0] == 200
    assert "already been loaded" in load(url, "good", good)[1]["error"]["message"]
    assert load(url, "good", good, load_inplace=True)[0] == 200
    for i in range(7):
        assert load(url, f"good{i}", good)[0] == 200
    assert "server.max_loras is 8" in load(url, "one-more", good)[1]["error"]["message"]
