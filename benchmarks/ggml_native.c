// What ggml-quants.c needs beside itself to decode, and ggml's rounding to bfloat16 behind its decoders.

#include "ggml-impl.h"

#include <stdlib.h>

// Called by code for quantizing and checking only, which the benchmark never enters.
void ggml_abort(const char * file, int line, const char * fmt, ...) {
    (void) file, (void) line, (void) fmt;
    abort();
}

size_t ggml_row_size(enum ggml_type type, int64_t ne) {
    (void) type, (void) ne;
    abort();
}

const char * ggml_type_name(enum ggml_type type) {
    (void) type;
    abort();
}

size_t ggml_type_size(enum ggml_type type) {
    (void) type;
    abort();
}

typedef void (*decoder)(const void * blocks, float * values, int64_t count);

enum { STRIP = 4096 };

// Strips stay in the first-level cache: faster than whole rows, and what a user of ggml could do.
void decode_rounded(
        decoder decode, const char * blocks, int64_t block_bytes, int64_t block_size,
        ggml_bf16_t * out, int64_t count) {
    float values[STRIP];
    for (int64_t start = 0; start < count; start += STRIP) {
        int64_t size = count - start < STRIP ? count - start : STRIP;
        decode(blocks + start / block_size * block_bytes, values, size);
        for (int64_t i = 0; i < size; ++i) {
            out[start + i] = ggml_compute_fp32_to_bf16(values[i]);
        }
    }
}
