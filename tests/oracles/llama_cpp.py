"""llama.cpp's runtime, in the shared library of an installed xllamacpp wheel.

The library exports llama.cpp's C functions beside its Python module; they are called directly,
because the module can't return the logits of all positions. The structs below are those of the
llama.h and mtmd.h in xllamacpp 2026.10.11549 (llama.cpp 0.6.0-dev). Structs change between
versions, so the defaults that the library itself fills in are checked before anything is used.
"""

import ctypes as c
import importlib.util
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from tests.oracles.gguf_rewrite import quantize, requantize_to_f32

__all__ = [
    "Model",
    "available",
    "image_generate",
    "image_logits",
    "quantize",
    "requantize_to_f32",
]

_F32, _F16 = 0, 1  # enum ggml_type
_NO_FLASH_ATTENTION = 0
_ERROR = 4  # GGML_LOG_LEVEL_ERROR
_CONTEXT = 1024  # tokens


class _ModelParameters(c.Structure):
    _fields_ = (
        *((name, c.c_void_p) for name in ("devices", "tensor_buft_overrides")),
        *((name, c.c_int32) for name in ("n_gpu_layers", "split_mode", "load_mode")),
        *((name, c.c_int32) for name in ("lazy_mode", "main_gpu")),
        *((name, c.c_void_p) for name in ("tensor_split", "progress_callback")),
        *((name, c.c_void_p) for name in ("progress_callback_user_data", "kv_overrides")),
        *((name, c.c_bool) for name in ("vocab_only", "check_tensors", "use_extra_bufts")),
        *((name, c.c_bool) for name in ("no_host", "no_alloc", "load_mtp")),
    )


class _ContextParameters(c.Structure):
    _fields_ = (
        *((name, c.c_uint32) for name in ("n_ctx", "n_batch", "n_ubatch", "n_seq_max")),
        *((name, c.c_uint32) for name in ("n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")),
        *((name, c.c_int32) for name in ("n_threads", "n_threads_batch", "ctx_type")),
        *((name, c.c_int32) for name in ("rope_scaling_type", "pooling_type")),
        *((name, c.c_int32) for name in ("attention_type", "flash_attn_type")),
        *((name, c.c_float) for name in ("rope_freq_base", "rope_freq_scale")),
        *((name, c.c_float) for name in ("yarn_ext_factor", "yarn_attn_factor")),
        *((name, c.c_float) for name in ("yarn_beta_fast", "yarn_beta_slow")),
        ("yarn_orig_ctx", c.c_uint32),
        ("defrag_thold", c.c_float),
        *((name, c.c_void_p) for name in ("cb_eval", "cb_eval_user_data")),
        *((name, c.c_int32) for name in ("type_k", "type_v")),
        ("moe_cache_size", c.c_size_t),
        *((name, c.c_void_p) for name in ("abort_callback", "abort_callback_data")),
        *((name, c.c_bool) for name in ("embeddings", "offload_kqv", "no_perf", "op_offload")),
        *((name, c.c_bool) for name in ("swa_full", "kv_unified")),
        ("samplers", c.c_void_p),
        ("n_samplers", c.c_size_t),
        ("ctx_other", c.c_void_p),
    )


class _Batch(c.Structure):
    _fields_ = (
        ("n_tokens", c.c_int32),
        ("token", c.POINTER(c.c_int32)),
        ("embd", c.POINTER(c.c_float)),
        ("pos", c.POINTER(c.c_int32)),
        ("n_seq_id", c.POINTER(c.c_int32)),
        ("seq_id", c.POINTER(c.POINTER(c.c_int32))),
        ("logits", c.POINTER(c.c_int8)),
    )


class _VisionParameters(c.Structure):
    _fields_ = (
        ("use_gpu", c.c_bool),
        ("device", c.c_void_p),
        ("print_timings", c.c_bool),
        ("n_threads", c.c_int),
        ("image_marker", c.c_char_p),
        ("media_marker", c.c_char_p),
        ("flash_attn_type", c.c_int),
        ("warmup", c.c_bool),
        ("image_min_tokens", c.c_int),
        ("image_max_tokens", c.c_int),
        ("cb_eval", c.c_void_p),
        ("cb_eval_user_data", c.c_void_p),
        ("batch_max_tokens", c.c_int32),
        ("progress_callback", c.c_void_p),
        ("progress_callback_user_data", c.c_void_p),
    )


class _InputText(c.Structure):
    _fields_ = (
        ("text", c.c_char_p),
        ("text_len", c.c_size_t),
        ("add_special", c.c_bool),
        ("parse_special", c.c_bool),
    )


_SIGNATURES = {  # name -> result, arguments
    "llama_model_default_params": (_ModelParameters, ()),
    "llama_context_default_params": (_ContextParameters, ()),
    "llama_model_load_from_file": (c.c_void_p, (c.c_char_p, _ModelParameters)),
    "llama_model_free": (None, (c.c_void_p,)),
    "llama_init_from_model": (c.c_void_p, (c.c_void_p, _ContextParameters)),
    "llama_free": (None, (c.c_void_p,)),
    "llama_model_get_vocab": (c.c_void_p, (c.c_void_p,)),
    "llama_vocab_n_tokens": (c.c_int32, (c.c_void_p,)),
    "llama_vocab_get_text": (c.c_char_p, (c.c_void_p, c.c_int32)),
    "llama_tokenize": (
        c.c_int32,
        (c.c_void_p, c.c_char_p, c.c_int32, c.c_void_p, c.c_int32, c.c_bool, c.c_bool),
    ),
    "llama_detokenize": (
        c.c_int32,
        (c.c_void_p, c.c_void_p, c.c_int32, c.c_char_p, c.c_int32, c.c_bool, c.c_bool),
    ),
    "llama_batch_init": (_Batch, (c.c_int32, c.c_int32, c.c_int32)),
    "llama_batch_free": (None, (_Batch,)),
    "llama_decode": (c.c_int32, (c.c_void_p, _Batch)),
    "llama_get_logits_ith": (c.POINTER(c.c_float), (c.c_void_p, c.c_int32)),
    "llama_get_memory": (c.c_void_p, (c.c_void_p,)),
    "llama_memory_clear": (None, (c.c_void_p, c.c_bool)),
    "mtmd_context_params_default": (_VisionParameters, ()),
    "mtmd_init_from_file": (c.c_void_p, (c.c_char_p, c.c_void_p, _VisionParameters)),
    "mtmd_free": (None, (c.c_void_p,)),
    "mtmd_default_marker": (c.c_char_p, ()),
    "mtmd_bitmap_init": (c.c_void_p, (c.c_uint32, c.c_uint32, c.c_char_p)),
    "mtmd_bitmap_free": (None, (c.c_void_p,)),
    "mtmd_input_chunks_init": (c.c_void_p, ()),
    "mtmd_input_chunks_free": (None, (c.c_void_p,)),
    "mtmd_tokenize": (
        c.c_int32,
        (c.c_void_p, c.c_void_p, c.POINTER(_InputText), c.POINTER(c.c_void_p), c.c_size_t),
    ),
    "mtmd_helper_eval_chunks": (
        c.c_int32,
        (
            *(c.c_void_p, c.c_void_p, c.c_void_p),
            *(c.c_int32, c.c_int32, c.c_int32, c.c_bool, c.POINTER(c.c_int32)),
        ),
    ),
}


class Model:
    """A GGUF model, run on the CPU with an F32 cache."""

    def __init__(self, path: str | Path, threads: int = 2):
        library = _library()
        parameters = library.llama_model_default_params()
        parameters.n_gpu_layers = 0
        parameters.use_extra_bufts = False  # no repacking of the weights
        self._threads = threads
        self._handle = library.llama_model_load_from_file(str(path).encode(), parameters)
        if not self._handle:
            raise RuntimeError(f"llama.cpp can't load {path}: {_last_error()}")
        context = library.llama_context_default_params()
        context.n_ctx = context.n_batch = context.n_ubatch = _CONTEXT
        context.n_outputs_max_per_seq = 0  # no limit
        context.n_threads = context.n_threads_batch = threads
        context.type_k = context.type_v = _F32
        context.flash_attn_type = _NO_FLASH_ATTENTION
        self._context = library.llama_init_from_model(self._handle, context)
        if not self._context:
            self.close()
            raise RuntimeError(f"llama.cpp can't run {path}: {_last_error()}")
        self._vocabulary = library.llama_model_get_vocab(self._handle)
        self.vocabulary_size = library.llama_vocab_n_tokens(self._vocabulary)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """The logits after every token of a prompt: float32 (len(ids), vocabulary)."""
        self._forget()
        self._decode(ids, 0)
        return np.stack([self._output(position) for position in range(len(ids))])

    def generate(self, ids: Sequence[int], count: int) -> list[int]:
        """The `count` most likely tokens after a prompt, one after the other."""
        self._forget()
        self._decode(ids, 0)
        return self._continue(len(ids), count)

    def tokenize(
        self, text: str, add_special: bool = True, parse_special: bool = True
    ) -> list[int]:
        raw = text.encode()
        room = len(raw) + 8
        out = (c.c_int32 * room)()
        count = _library().llama_tokenize(
            self._vocabulary, raw, len(raw), out, room, add_special, parse_special
        )
        if count < 0:
            raise RuntimeError(f"{text!r} has more than {room} tokens")
        return list(out[:count])

    def detokenize(self, ids: Sequence[int], show_special: bool = True) -> str:
        tokens = (c.c_int32 * len(ids))(*ids)
        room = 64 * len(ids) + 64
        out = c.create_string_buffer(room)
        size = _library().llama_detokenize(
            self._vocabulary, tokens, len(ids), out, room, False, show_special
        )
        return out.raw[:size].decode("utf-8", "replace")

    def close(self) -> None:
        if getattr(self, "_context", None):
            _library().llama_free(self._context)
        if self._handle:
            _library().llama_model_free(self._handle)
        self._context = self._handle = None

    def __enter__(self) -> "Model":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _forget(self) -> None:
        library = _library()
        library.llama_memory_clear(library.llama_get_memory(self._context), True)

    def _decode(self, ids: Sequence[int], start: int) -> None:
        library = _library()
        batch = library.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for index, token in enumerate(ids):
            batch.token[index] = token
            batch.pos[index] = start + index
            batch.n_seq_id[index] = 1
            batch.seq_id[index][0] = 0
            batch.logits[index] = 1
        code = library.llama_decode(self._context, batch)
        library.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}: {_last_error()}")

    def _output(self, index: int) -> np.ndarray:
        pointer = _library().llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, (self.vocabulary_size,)).copy()

    def _continue(self, position: int, count: int) -> list[int]:
        generated = [int(self._output(-1).argmax())]
        while len(generated) < count:
            self._decode(generated[-1:], position)
            generated.append(int(self._output(-1).argmax()))
            position += 1
        return generated

    def _see(self, mmproj: str | Path, image: str | Path, prompt: str) -> int:
        """Run a prompt with an image and return the position after it."""
        library = _library()
        with _vision(mmproj, self._handle, self._threads) as vision, _bitmap(image) as bitmap:
            raw = prompt.replace("<image>", library.mtmd_default_marker().decode()).encode()
            text = _InputText(raw, len(raw), True, True)
            chunks = library.mtmd_input_chunks_init()
            try:
                bitmaps = (c.c_void_p * 1)(bitmap)
                code = library.mtmd_tokenize(vision, chunks, c.byref(text), bitmaps, 1)
                if code:
                    raise RuntimeError(f"mtmd_tokenize returned {code}: {_last_error()}")
                self._forget()
                position = c.c_int32()
                code = library.mtmd_helper_eval_chunks(
                    vision, self._context, chunks, 0, 0, _CONTEXT, True, c.byref(position)
                )
                if code:
                    raise RuntimeError(f"mtmd_helper_eval_chunks returned {code}: {_last_error()}")
            finally:
                library.mtmd_input_chunks_free(chunks)
        return position.value


def image_logits(
    model: str | Path, mmproj: str | Path, image: str | Path, prompt: str
) -> np.ndarray:
    """The logits after a prompt in which `<image>` stands for the image: float32 (vocabulary,).

    llama.cpp puts the markers around the image itself (<|vision_start|> ... for Qwen).
    """
    with Model(model) as opened:
        opened._see(mmproj, image, prompt)
        return opened._output(-1)


def image_generate(
    model: str | Path, mmproj: str | Path, image: str | Path, prompt: str, count: int
) -> list[int]:
    """The `count` most likely tokens after a prompt in which `<image>` stands for the image."""
    with Model(model) as opened:
        position = opened._see(mmproj, image, prompt)
        return opened._continue(position, count)


def available() -> bool:
    """Whether an xllamacpp wheel with its library is installed."""
    return _library_path() is not None


def _library_path() -> Path | None:
    spec = importlib.util.find_spec("xllamacpp")
    folders = spec.submodule_search_locations or [] if spec else []
    return next((file for folder in folders for file in Path(folder).glob("xllamacpp*.so")), None)


@cache
def _library() -> c.CDLL:
    path = _library_path()
    if path is None:
        raise RuntimeError("the llama.cpp oracle needs the xllamacpp wheel: pip install xllamacpp")
    library = c.CDLL(str(path))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    library.llama_log_set(_remember_error, None)
    library.mtmd_helper_log_set(_remember_error, None)
    library.llama_backend_init()
    _check_structs(library)
    return library


def _check_structs(library: c.CDLL) -> None:
    """Compare the defaults of a few fields, from first to last, with what llama.cpp documents."""
    model = library.llama_model_default_params()
    context = library.llama_context_default_params()
    vision = library.mtmd_context_params_default()
    as_expected = (
        (model.n_gpu_layers, model.main_gpu, model.use_extra_bufts) == (-1, 0, True)
        and (context.n_ctx, context.n_batch, context.n_ubatch) == (512, 2048, 512)
        and (context.n_outputs_max, context.n_outputs_max_per_seq) == (0, 1)
        and (context.flash_attn_type, context.defrag_thold) == (-1, -1.0)
        and (context.type_k, context.type_v, context.moe_cache_size) == (_F16, _F16, 0)
        and (context.offload_kqv, context.swa_full, context.kv_unified) == (True, True, False)
        and (context.samplers, context.n_samplers, context.ctx_other) == (None, 0, None)
        and vision.media_marker == library.mtmd_default_marker()
        and (vision.image_max_tokens, vision.batch_max_tokens) == (-1, 1024)
    )
    if not as_expected:
        raise RuntimeError("the structs of this xllamacpp version are not those of 2026.10.11549")


_errors: list[str] = []


@c.CFUNCTYPE(None, c.c_int, c.c_char_p, c.c_void_p)
def _remember_error(level: int, text: bytes, _: object) -> None:
    if level == _ERROR:
        _errors.append(text.decode("utf-8", "replace").strip())


def _last_error() -> str:
    return " / ".join(_errors[-3:]) or "no reason given"


@contextmanager
def _vision(mmproj: str | Path, model: int, threads: int) -> Iterator[int]:
    library = _library()
    parameters = library.mtmd_context_params_default()
    parameters.use_gpu = parameters.print_timings = parameters.warmup = False
    parameters.n_threads = threads
    parameters.flash_attn_type = _NO_FLASH_ATTENTION
    vision = library.mtmd_init_from_file(str(mmproj).encode(), model, parameters)
    if not vision:
        raise RuntimeError(f"llama.cpp can't load {mmproj}: {_last_error()}")
    try:
        yield vision
    finally:
        library.mtmd_free(vision)


@contextmanager
def _bitmap(image: str | Path) -> Iterator[int]:
    from PIL import Image

    with Image.open(image) as opened:
        pixels = opened.convert("RGB")
        bitmap = _library().mtmd_bitmap_init(*pixels.size, pixels.tobytes())
    try:
        yield bitmap
    finally:
        _library().mtmd_bitmap_free(bitmap)
