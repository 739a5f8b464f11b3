"""Level 2 and 3: does the version fit the engine, and does the engine hold it?"""

from __future__ import annotations

import json
from typing import Any

import pytest

from ckptsync.engine import Confirmation, StagedVersion
from ckptsync.errors import BadShard, ProofFailed, SchemaMismatch
from ckptsync.manifest import TensorSpec
from watchers.proof import Fingerprints, check_index, check_schema

from .publish import SCHEMA, SPECS, TestPublisher


def test_a_version_that_fits_passes(publisher: TestPublisher) -> None:
    check_schema(publisher.write(), SCHEMA)


def test_an_engine_that_cannot_say_its_schema_is_not_checked(publisher: TestPublisher) -> None:
    check_schema(publisher.write(), None)


def test_case_90_a_tensor_that_the_engine_needs_and_the_version_lacks_is_refused(
    publisher: TestPublisher,
) -> None:
    with pytest.raises(SchemaMismatch, match=r"1 that the engine needs are not in the version \(norm.weight\)"):
        check_schema(publisher.write(specs=SPECS[:-1]), SCHEMA)


def test_case_65_empty_tensors_in_place_of_real_ones_are_refused_with_their_count_and_first_names(
    publisher: TestPublisher,
) -> None:
    """An ungathered ZeRO-3 state dict: every digest is right, and there is nothing in it."""
    hollow = [TensorSpec(s.name, s.dtype, (0,)) if s.name.startswith("layers") else s for s in SPECS]
    with pytest.raises(SchemaMismatch) as caught:
        check_schema(publisher.write(specs=hollow), SCHEMA)
    reason = "2 of another shape (layers.0.weight 0 but the engine has 8x8, layers.1.weight 0 but the engine has 8x8)"
    assert reason in str(caught.value)


def test_case_76_trained_modules_that_were_left_out_of_the_version_are_refused_by_name(
    publisher: TestPublisher,
) -> None:
    """A classification head from PEFT's `modules_to_save`, trained beside the adapter and not exported."""
    head = TensorSpec("score.weight", "F32", (2, 8))
    with pytest.raises(SchemaMismatch, match=r"1 that the engine needs are not in the version \(score.weight\)"):
        check_schema(publisher.write(), {**SCHEMA, head.name: head})


def test_case_77_the_message_counts_and_shows_three_names_of_each_side(publisher: TestPublisher) -> None:
    engine = {
        f"language_model.{name}": TensorSpec(f"language_model.{name}", s.dtype, s.shape) for name, s in SCHEMA.items()
    }
    with pytest.raises(SchemaMismatch) as caught:
        check_schema(publisher.write(), engine)
    message = str(caught.value)
    assert "4 that the engine needs are not in the version (language_model.embed.weight, " in message
    assert "4 that the engine does not know (embed.weight, layers.0.weight, layers.1.weight, ...)" in message


def test_case_93_another_shape_under_the_same_name_is_refused(publisher: TestPublisher) -> None:
    bigger = {**SCHEMA, "norm.weight": TensorSpec("norm.weight", "F32", (16,))}
    with pytest.raises(SchemaMismatch, match=r"1 of another shape .norm.weight 8 but the engine has 16"):
        check_schema(publisher.write(), bigger)


def test_case_92_another_dtype_is_refused_and_named(publisher: TestPublisher) -> None:
    half = {**SCHEMA, "norm.weight": TensorSpec("norm.weight", "BF16", (8,))}
    with pytest.raises(SchemaMismatch, match=r"1 of another dtype \(norm.weight F32 but the engine has BF16\)"):
        check_schema(publisher.write(), half)


def test_with_allow_cast_plain_floats_may_differ_and_nothing_else(publisher: TestPublisher) -> None:
    def engine(dtype: str) -> dict[str, TensorSpec]:
        return {**SCHEMA, "norm.weight": TensorSpec("norm.weight", dtype, (8,))}

    check_schema(publisher.write(), engine("BF16"), allow_cast=True)
    for dtype in ("I32", "F8_E4M3"):
        with pytest.raises(SchemaMismatch, match="another dtype"):
            check_schema(publisher.write(), engine(dtype), allow_cast=True)


@pytest.mark.parametrize("needed", ["embed.weight", "lm_head.weight"])
def test_a_tied_tensor_is_provided_under_each_name_and_needed_under_one(publisher: TestPublisher, needed: str) -> None:
    manifest = publisher.write(aliases={"lm_head.weight": "embed.weight"})
    engine = {name: spec for name, spec in SCHEMA.items() if name != "embed.weight"}
    check_schema(manifest, {**engine, needed: TensorSpec(needed, "F32", (16, 8))})


def index_of(manifest: Any, **changes: str) -> dict[str, str]:
    return {**{t.name: t.file for t in manifest.tracks["model"].tensors}, **changes}


def write_index(folder: Any, weight_map: object) -> str:
    path = folder / "model.safetensors.index.json"
    path.write_text(json.dumps({"weight_map": weight_map}))
    return str(path)


def test_an_index_that_agrees_with_the_manifest_passes(publisher: TestPublisher, tmp_path: Any) -> None:
    manifest = publisher.write()
    check_index(write_index(tmp_path, index_of(manifest)), manifest.tracks["model"])


@pytest.mark.parametrize("value", ["../x", "/etc/x", "a/b", "a\0b", "C:\\x", ""])
def test_case_84_an_index_that_leads_outside_is_refused(publisher: TestPublisher, tmp_path: Any, value: str) -> None:
    manifest = publisher.write()
    path = write_index(tmp_path, index_of(manifest, **{"norm.weight": value}))
    with pytest.raises(BadShard, match=r"index.json: tensor 'norm.weight'"):
        check_index(path, manifest.tracks["model"])


def test_case_81_an_old_index_is_refused(publisher: TestPublisher, tmp_path: Any) -> None:
    manifest = publisher.write()
    stale = write_index(tmp_path, index_of(manifest, **{"norm.weight": "model-00009-of-00009.safetensors"}))
    with pytest.raises(BadShard, match="the manifest into model-00002-of-00002"):
        check_index(stale, manifest.tracks["model"])
    short = write_index(tmp_path, {"norm.weight": index_of(manifest)["norm.weight"]})
    with pytest.raises(BadShard, match="lacks 3 of the manifest's tensors"):
        check_index(short, manifest.tracks["model"])


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": {"a": 1}}', '{"weight_map"'])
def test_an_index_that_is_none_is_refused(publisher: TestPublisher, tmp_path: Any, text: str) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(text)
    with pytest.raises(BadShard, match="not a safetensors index"):
        check_index(str(path), publisher.write().tracks["model"])


def test_case_105_a_label_other_than_the_one_loaded_is_no_proof(publisher: TestPublisher) -> None:
    version = StagedVersion(manifest=publisher.write(), folder="/")
    for label in ("", "None", "e1-v9"):
        with pytest.raises(ProofFailed, match="after loading e1-v1"):
            Fingerprints().check(version, Confirmation(label=label))


def test_the_same_content_must_have_the_same_fingerprint_again(publisher: TestPublisher) -> None:
    seen = Fingerprints()
    first, again = (StagedVersion(manifest=publisher.write(seed=7), folder="/") for _ in range(2))
    seen.check(first, Confirmation(label=first.label, fingerprint="aa"))
    seen.check(again, Confirmation(label=again.label, fingerprint="aa"))
    for other in ("bb", ""):
        with pytest.raises(ProofFailed, match=f"e1-v2 has fingerprint {other or 'none'} in the engine, and had aa"):
            seen.check(again, Confirmation(label=again.label, fingerprint=other))
    seen.forget()
    seen.check(again, Confirmation(label=again.label, fingerprint="bb"))
