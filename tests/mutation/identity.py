"""Mutations of what tells models, requests and layouts apart."""

from __future__ import annotations

from mutation.catalog import Mutation

_HERE = "lmcache_persist/connector/vllm/"
_TESTS = "tests/unit/connector_vllm/"
_MODEL = (_TESTS + "test_model_identity.py",)
_WEIGHTS = (_TESTS + "test_weights.py",)
_REQUESTS = (_TESTS + "test_requests.py",)
_ADAPTERS = (_TESTS + "test_adapters.py",)
_MEDIA = (_TESTS + "test_media.py",)
_LAYOUT = (_TESTS + "test_kv_geometry.py",)
_SCHEDULER = (_TESTS + "test_scheduler_side.py",)
_NAMESPACE = (_TESTS + "test_private_namespace.py",)


def _without(name: str, file: str, line: str, tests: tuple[str, ...]) -> Mutation:
    """A line left out."""
    return Mutation(name, _HERE + file, line + "\n", "", tests)


def _field(name: str, line: str) -> Mutation:
    """A field that the identity does not have."""
    return _without(name + "-not-in-the-identity", "model_identity.py", " " * 8 + line, _MODEL)


MUTATIONS = (
    _field("engine-version", '"engine": {"vllm": vllm.__version__},'),
    _field("code-revision", '"code_revision": model.code_revision,'),
    _field("implementation", '"implementation": implementation,'),
    _field("load-format", '"load_format": _checkpoint(vllm_config),'),
    _field("second-config", '"second_config": model_files.compact(second[0]) if second else None,'),
    _field("overrides", '"overrides": model_files.compact(overrides),'),
    _field("generation", '"generation": _generation(model, located),'),
    _field("cache-dtype", '"cache_dtype": str(vllm_config.cache_config.cache_dtype),'),
    _field("dtype", '"dtype": str(model.dtype),'),
    _field("sliding-window", '"sliding_window_disabled": model.disable_sliding_window,'),
    _field("multimodal", '"multimodal": _multimodal(model),'),
    _field("additional", '"additional": _additional(vllm_config),'),
    _field("runner", '"runner": "v2" if vllm_config.use_v2_model_runner else "v1",'),
    Mutation(
        "max-model-len-ignored",
        _HERE + "model_identity.py",
        "model.max_model_len if lengths_matter or own_code else None",
        "None",
        _MODEL,
    ),
    Mutation(
        "max-model-len-always-counts",
        _HERE + "model_identity.py",
        "model.max_model_len if lengths_matter or own_code else None",
        "model.max_model_len",
        _MODEL,
    ),
    Mutation(
        "overrides-do-not-scale",
        _HERE + "model_identity.py",
        "depends_on_max_model_len(config, *second, overrides)",
        "depends_on_max_model_len(config, *second)",
        _MODEL,
    ),
    Mutation(
        "own-code-trusted-with-lengths",
        _HERE + "model_identity.py",
        " if lengths_matter or own_code else",
        " if lengths_matter else",
        _MODEL,
    ),
    Mutation(
        "factor-need-not-be-there",
        _HERE + "context_length.py",
        "        or (kind in SCALED_BY_FACTOR and",
        "        or (False and",
        _MODEL,
    ),
    Mutation(
        "legacy-rope-name-ignored",
        _HERE + "context_length.py",
        '("rope_type", "type")',
        '("rope_type",)',
        _MODEL,
    ),
    Mutation(
        "batch-dependent-rope-cached",
        _HERE + "model_identity.py",
        "if model.using_transformers_backend() and context_length",
        "if False and context_length",
        _MODEL,
    ),
    Mutation(
        "interleaving-ignored",
        _HERE + "model_identity.py",
        "parallel.cp_kv_cache_interleave_size if context_ranks > 1 else 1",
        "1",
        _MODEL,
    ),
    Mutation(
        "encoder-decoder-cached",
        _HERE + "model_identity.py",
        "    if model.is_encoder_decoder:",
        "    if False:",
        _MODEL,
    ),
    Mutation(
        "second-repository-ignored",
        _HERE + "model_identity.py",
        "OTHER_REPOSITORY_SUFFIX) and value:",
        "OTHER_REPOSITORY_SUFFIX) and False:",
        _MODEL,
    ),
    Mutation(
        "cosmetic-keys-count",
        _HERE + "model_files.py",
        "without_cosmetic_keys(config).items()",
        "config.items()",
        _MODEL,
    ),
    Mutation(
        "files-beside-the-weights-ignored",
        _HERE + "model_files.py",
        "    paths = [path for path in folder.glob",
        "    paths = [path for path in [] and folder.glob",
        _MODEL,
    ),
    Mutation(
        "own-code-ignored",
        _HERE + "model_files.py",
        '        paths.extend(folder.glob("*.py"))',
        "        pass",
        _MODEL,
    ),
    Mutation(
        "snapshot-not-digested",
        _HERE + "model_files.py",
        'digest = {"digest": digest_files(model.folder, files)} if files else {}',
        "digest: dict[str, str] = {}",
        _MODEL,
    ),
    Mutation(
        "weights-sampled-at-the-head",
        _HERE + "weights.py",
        "for at in _sample_offsets(end - begin):",
        "for at in [0]:",
        _WEIGHTS,
    ),
    Mutation(
        "weights-all-read",
        _HERE + "weights.py",
        "BYTES_PER_SAMPLE = 64 << 20",
        "BYTES_PER_SAMPLE = 64 << 10",
        _WEIGHTS,
    ),
    Mutation(
        "neighbour-s-sample-not-read",
        _HERE + "weights.py",
        "            end = max(end, stop)\n",
        "",
        _WEIGHTS,
    ),
    Mutation(
        "ranges-without-a-bound",
        _HERE + "weights.py",
        "if at <= end and stop - begin <= MAX_RANGE_BYTES:",
        "if at <= end:",
        _WEIGHTS,
    ),
    _without(
        "weights-without-names",
        "weights.py",
        " " * 12 + "_add(digest, os.fsencode(path.relative_to(folder)))",
        _WEIGHTS,
    ),
    _without("weights-without-headers", "weights.py", " " * 8 + "_add(digest, header)", _WEIGHTS),
    Mutation(
        "weights-of-folders-in-it-ignored",
        _HERE + "weights.py",
        ', *folder.glob("[!.]*/*.safetensors")]',
        "]",
        _WEIGHTS,
    ),
    Mutation(
        "salt-ignored",
        _HERE + "requests.py",
        "        if request.cache_salt:",
        "        if False:",
        _REQUESTS,
    ),
    Mutation(
        "empty-salt-counts",
        _HERE + "requests.py",
        "        if request.cache_salt:",
        "        if request.cache_salt is not None:",
        _REQUESTS,
    ),
    _without(
        "adapter-ignored",
        "requests.py",
        " " * 12 + "common.append(ExtraKey(ExtraKind.LORA, adapter.key))",
        _REQUESTS,
    ),
    Mutation(
        "salt-and-adapter-of-one-kind",
        _HERE + "requests.py",
        "ExtraKey(ExtraKind.LORA, adapter.key)",
        "ExtraKey(ExtraKind.SALT, adapter.key)",
        (_TESTS + "test_requests.py::test_kinds_of_extra_do_not_mix",),
    ),
    Mutation(
        "item-without-offset",
        _HERE + "media.py",
        'struct.pack("<qQ", self.offset - chunk_start, self.length)',
        'struct.pack("<qQ", 0, self.length)',
        _REQUESTS,
    ),
    Mutation(
        "item-in-its-first-chunk-only",
        _HERE + "media.py",
        "return self.offset < end and self.offset + self.length > start",
        "return start <= self.offset < end",
        _MEDIA,
    ),
    Mutation(
        "item-by-its-name",
        _HERE + "media.py",
        "        digest = digest_item(data)\n",
        "        digest = blake3(name.encode()).digest()\n",
        _MEDIA,
    ),
    Mutation(
        "item-with-two-contents-cached",
        _HERE + "media.py",
        "            same = digest_item(data) == digest\n",
        "            same = True\n",
        _MEDIA,
    ),
    Mutation(
        "item-without-tensors-cached",
        _HERE + "media.py",
        '        raise TypeError(f"{type(value).__name__} is no tensor")',
        "        _add_text(digest, repr(value))",
        _MEDIA,
    ),
    Mutation(
        "adapter-newer-than-the-engine",
        _HERE + "adapters.py",
        "            if max(when for file in stamp for when in file[3:]) >= self._since_ns:",
        "            if False:",
        _ADAPTERS,
    ),
    Mutation(
        "adapter-overwritten-unnoticed",
        _HERE + "adapters.py",
        "(first_said != said or not adapter.is_unchanged())",
        "first_said != said",
        _ADAPTERS,
    ),
    Mutation(
        "adapter-number-reused-unnoticed",
        _HERE + "adapters.py",
        "(first_said != said or not adapter.is_unchanged())",
        "not adapter.is_unchanged()",
        _ADAPTERS,
    ),
    _without("adapter-by-name-only", "adapters.py", '            "weights": digest,', _ADAPTERS),
    _without("adapter-without-config", "adapters.py", '            "config": config,', _ADAPTERS),
    Mutation(
        "stored-under-an-adapter-of-the-past",
        _HERE + "scheduler_side.py",
        " or not self._still_holds(tracked)",
        "",
        _SCHEDULER,
    ),
    Mutation(
        "one-extra-for-all-chunks",
        _HERE + "requests.py",
        "        if not self.items:\n",
        "        if True:\n",
        _SCHEDULER,
    ),
    Mutation(
        "reset-goes-on-with-shared-hashes",
        _HERE + "scheduler_side.py",
        "ChunkHasher(binding.chunk_size, self._namespace)",
        "ChunkHasher(binding.chunk_size)",
        _NAMESPACE,
    ),
    Mutation(
        "every-reset-in-the-same-namespace",
        _HERE + "scheduler_side.py",
        "os.urandom(NAMESPACE_BYTES)",
        "bytes(NAMESPACE_BYTES)",
        _NAMESPACE,
    ),
    Mutation(
        "old-blocks-stored-after-a-reset",
        _HERE + "scheduler_side.py",
        "self._mixed = not blocks_are_free",
        "self._mixed = False",
        _NAMESPACE,
    ),
    Mutation(
        "old-promises-kept-after-a-reset",
        _HERE + "scheduler_side.py",
        "            self._adopt(self._binding)\n        if self._mixed:",
        "            self._hasher = ChunkHasher(self._binding.chunk_size, self._namespace)\n"
        "        if self._mixed:",
        _NAMESPACE,
    ),
    Mutation(
        "trainer-s-weights-shared",
        _HERE + "connector.py",
        "if vllm_config.weight_transfer_config is not None:",
        "if False:",
        _NAMESPACE,
    ),
    Mutation(
        "held-blocks-not-asked-for",
        _HERE + "connector.py",
        "pool.num_gpu_blocks - pool.get_num_free_blocks() == 1",
        "True",
        _NAMESPACE,
    ),
    _without(
        "isa-not-in-the-layout",
        "layouts.py",
        '        "isa": getattr(module, "isa", None),',
        _LAYOUT,
    ),
    Mutation(
        "spec-fields-not-in-the-layout",
        _HERE + "layouts.py",
        "for one in dataclasses.fields(spec)}",
        "for one in ()}",
        _LAYOUT,
    ),
    Mutation(
        "layer-order-not-in-the-layout",
        _HERE + "layouts.py",
        "        layers.append([name, forms.index(form)])",
        "        layers = sorted([*layers, [name, forms.index(form)]])",
        _LAYOUT,
    ),
    Mutation(
        "nearest-model-is-the-last",
        "lmcache_persist/server/report.py",
        "min(before, key=lambda pair: len(pair[0]))",
        "before[0]",
        ("tests/unit/server/test_report.py",),
    ),
)
