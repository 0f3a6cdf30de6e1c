/* The cache for engines in C, and for whatever calls C. C99; compiles as C++ too. The words and what
 * they mean are those of kv_cache_manager.hpp, settings.hpp, reports.hpp and view.hpp; here stands
 * what is different. docs/embedding.md has a section "From C".
 *
 *   verkv_layer_config layer;
 *   verkv_layer_config_init(&layer, sizeof layer, NULL);
 *   layer.kv_heads = 8; layer.query_heads = 32;
 *   layer.key_dim = 128; layer.value_dim = 128;
 *   verkv_cache_config config;
 *   verkv_cache_config_init(&config, sizeof config, NULL);
 *   config.layers = &layer;
 *   config.layer_count = 1;
 *
 *   verkv_error error = {.size = sizeof error};
 *   verkv_cache* cache;
 *   if (verkv_make_cpu_cache(&config, &cache, &error) != VERKV_OK) report(error.text);
 *
 * Errors. Every call returns a code, VERKV_OK where it has done what it says; else the cache is as it
 * was. A verkv_error, if one is given, then has code, place and text; a call that succeeds does not
 * touch it. No C++ exception leaves a call. NULL where something is needed, a negative length and a
 * length that does not fit are VERKV_ERROR_SHAPE. Nothing is global, nothing is per thread.
 *
 * Structures that may grow begin with `size`: the caller sets it to sizeof before the call, also for
 * what the call fills in. Elements of arrays have no such field; the size of one stands beside the
 * array. A smaller structure than the library's (an older caller's) is taken as it is, and what it
 * lacks has its default; a larger one is taken if what the library does not know is zero. What a call
 * fills in beyond what the library knows is zero. Other structures never change.
 *
 * Lengths are counts of elements unless their name says bytes. Flags are 0 or not 0.
 *
 * The factory of caches on a GPU (cuda_cache.hpp) is in C++ only.
 */
#ifndef VERKV_VERKV_H
#define VERKV_VERKV_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Has macros only: the version and VERKV_API. */
#include <verkv/config.hpp>

#ifdef __cplusplus
extern "C" {
#endif

/* Of the header that the program was compiled with; verkv_version: of the library that it runs with. */
#define VERKV_VERSION \
  (VERKV_VERSION_MAJOR * 1000000 + VERKV_VERSION_MINOR * 1000 + VERKV_VERSION_PATCH)
VERKV_API int32_t verkv_version(void);

/* ---- Errors */

/* The numbers are those of verkv::ErrorCode (error.hpp says what each means), whose 0 the library does
 * not use. The last three are C's own. New codes may come. */
typedef int32_t verkv_code;
enum {
  VERKV_OK = 0,
  VERKV_ERROR_SETTING = 1,
  VERKV_ERROR_UNKNOWN_SEQUENCE = 2,
  VERKV_ERROR_UNKNOWN_LAYER = 3,
  VERKV_ERROR_REPEATED = 4,
  VERKV_ERROR_SHAPE = 5,
  VERKV_ERROR_NUMBER = 6,
  VERKV_ERROR_WRONG_PROCESS = 7,
  VERKV_ERROR_WRONG_BACKEND = 8,
  VERKV_ERROR_FAST_LIMIT = 9,
  VERKV_ERROR_HOST_LIMIT = 10,
  VERKV_ERROR_TOKEN_LIMIT = 11,
  VERKV_ERROR_ROW_LIMIT = 12,
  VERKV_ERROR_THREAD_LIMIT = 13,
  VERKV_ERROR_DEVICE = 14,
  VERKV_ERROR_DEVICE_MEMORY = 15,
  VERKV_ERROR_SYSTEM_MEMORY = 16,
  VERKV_ERROR_FORMAT = 17,
  VERKV_ERROR_BEING_COMPRESSED = 18,
  VERKV_ERROR_FILE_FULL = 19,
  VERKV_ERROR_FILE = 20,
  VERKV_ERROR_NO_MEMORY = 1000, /* std::bad_alloc */
  VERKV_ERROR_INTERNAL = 1001,  /* an exception that is no error of the library */
  VERKV_ERROR_CALLBACK = 1002   /* a function of the caller failed: verkv_error::callback_status */
};

/* The code's name in lower case, as of verkv::ErrorCode; "ok", "no_memory", "internal", "callback"; "?"
 * for a number that is no code. */
VERKV_API const char* verkv_code_name(verkv_code code);

typedef struct verkv_error {
  size_t size;
  verkv_code code;
  int32_t device_code;     /* of VERKV_ERROR_DEVICE and _DEVICE_MEMORY: the device runtime's; else 0 */
  int64_t callback_status; /* of VERKV_ERROR_CALLBACK: what the function returned; else 0 */
  /* -1 where the error is not about one place. */
  int64_t layer;
  int64_t row;
  int64_t head;
  int64_t token;
  /* For people; ends with a zero byte, cut where it is longer. */
  char text[512];
} verkv_error;

/* ---- Settings: settings.hpp */

enum { VERKV_DTYPE_F32 = 0, VERKV_DTYPE_F16 = 1, VERKV_DTYPE_BF16 = 2 };
enum { VERKV_SKETCH_KIND_EXACT = 0, VERKV_SKETCH_KIND_CALIBRATED = 1 };
enum { VERKV_FETCH_MODE_VERIFIED = 0, VERKV_FETCH_MODE_NEVER = 1, VERKV_FETCH_MODE_ALWAYS = 2 };
enum { VERKV_POOL_HEAD = 0, VERKV_POOL_LAYER = 1, VERKV_POOL_SEQUENCE = 2 };
enum { VERKV_SELECTION_POISSON = 0, VERKV_SELECTION_TOPK = 1, VERKV_SELECTION_SPREAD = 2 };
enum { VERKV_ESTIMATOR_PLAIN = 0, VERKV_ESTIMATOR_CLUSTERS = 1 };
enum { VERKV_HOST_TIER_OWN = 0, VERKV_HOST_TIER_ENGINE = 1, VERKV_HOST_TIER_FILE = 2 };
enum { VERKV_FETCH_ORDER_WORTH = 0, VERKV_FETCH_ORDER_EXACT = 1 };

/* has_value 0: off, or none. */
typedef struct verkv_optional_double {
  int64_t has_value;
  double value;
} verkv_optional_double;

typedef struct verkv_optional_int64 {
  int64_t has_value;
  int64_t value;
} verkv_optional_int64;

typedef struct verkv_layer_config {
  int64_t kv_heads;
  int64_t query_heads;
  int64_t key_dim;
  int64_t value_dim;
  verkv_optional_double scale;
  verkv_optional_double soft_cap;
  int32_t cached;
  int32_t dense;
  verkv_optional_int64 window;
  verkv_optional_int64 global_layer;
  int64_t first_global_kv_head;
  /* Copied; of verkv_config_of_layer the cache's own. */
  const float* sink_logits;
  int64_t sink_logit_count;
  int64_t value_is_key_prefix;
  verkv_optional_int64 global_kv_heads;
  verkv_optional_int64 global_query_heads;
  verkv_optional_int64 compress_from;
} verkv_layer_config;

/* Calls part(argument, 0) .. part(argument, parts - 1) as verkv::Executor does. */
typedef void (*verkv_part)(void* argument, int32_t index);
typedef void (*verkv_executor)(void* user, int32_t parts, verkv_part part, void* argument);

/* verkv::TierAllocator: both functions or none. */
typedef struct verkv_tier_allocator {
  void* (*allocate)(void* user, size_t bytes, size_t alignment); /* NULL result: no memory */
  void (*release)(void* user, void* memory, size_t bytes, size_t alignment);
  void* user; /* must outlive the cache */
} verkv_tier_allocator;

/* What stands in CacheConfig::fetch, sketch and study begins with fetch_, sketch_ and study_. */
typedef struct verkv_cache_config {
  size_t size;
  const verkv_layer_config* layers;
  int64_t layer_count;
  size_t layer_size; /* sizeof(verkv_layer_config) */
  double keep;
  int32_t storage; /* VERKV_DTYPE_ */
  int32_t pool;
  int32_t fetch_mode;
  int32_t sketch_kind;
  verkv_optional_double fetch_risk;
  verkv_optional_double fetch_epsilon;
  double fetch_delta;
  verkv_optional_int64 fetch_limit_tokens;
  verkv_optional_int64 fast_bytes_limit;
  verkv_optional_int64 host_bytes_limit;
  int64_t local_tokens;
  int64_t sink_tokens;
  verkv_optional_int64 chunk_tokens;
  verkv_optional_int64 compress_from;
  int64_t sketch_bits;
  uint64_t seed;
  verkv_optional_int64 threads;
  verkv_executor executor; /* NULL: none */
  void* executor_user;     /* the executor's first argument; must outlive the cache */
  int32_t study_select; /* VERKV_SELECTION_ */
  int32_t study_estimator;
  double study_inclusion_floor;
  int32_t study_order; /* VERKV_FETCH_ORDER_ */
  int32_t study_vector_code;
  verkv_optional_double study_probability;
  verkv_optional_double study_cap;
  int64_t host; /* VERKV_HOST_TIER_ */
  int64_t chunks_in_turn;
  verkv_tier_allocator fast_allocator;
  verkv_tier_allocator host_allocator;
  int64_t window_margin;
  /* NULL: empty. What verkv_config gives is the cache's, as long as it lives. */
  const char* host_directory;
} verkv_cache_config;

/* Set every field to its default, `size` and layer_size to those of the caller. */
VERKV_API verkv_code verkv_layer_config_init(verkv_layer_config* layer, size_t size,
                                             verkv_error* error);
VERKV_API verkv_code verkv_cache_config_init(verkv_cache_config* config, size_t size,
                                             verkv_error* error);

/* Texts. `text` has room for `bytes` bytes, gets what fits there and ends with a zero byte; `length` is
 * set to the whole text's length without that byte. text may be NULL where bytes is 0, else length
 * may be NULL. */

/* Why this configuration cannot be served, a sentence a line; empty if it can. A value that is outside
 * 8 bits (of an enumeration) or 32 bits (sketch_bits, threads) is VERKV_ERROR_SETTING. */
VERKV_API verkv_code verkv_unsupported_reasons(const verkv_cache_config* config, char* text,
                                               size_t bytes, size_t* length, verkv_error* error);

/* For studies: verkv::keep_for_fast_share. layer_size: sizeof(verkv_layer_config). */
VERKV_API verkv_code verkv_keep_for_fast_share(double fast_share, const verkv_layer_config* layer,
                                               size_t layer_size, int32_t storage,
                                               int32_t sketch_kind, int64_t sketch_bits,
                                               int32_t study_estimator, double* keep,
                                               verkv_error* error);

/* ---- The cache */

/* verkv::KvCacheManager. */
typedef struct verkv_cache verkv_cache;

/* `cache` is NULL afterwards where the call fails. */
VERKV_API verkv_code verkv_make_cpu_cache(const verkv_cache_config* config, verkv_cache** cache,
                                          verkv_error* error);
/* Does nothing with NULL. */
VERKV_API void verkv_destroy(verkv_cache* cache);

/* The configuration but for the layers, of which it has the number: `layers` is NULL. */
VERKV_API verkv_code verkv_config(const verkv_cache* cache, verkv_cache_config* config,
                                  verkv_error* error);
/* One layer of it; size: sizeof(verkv_layer_config). */
VERKV_API verkv_code verkv_config_of_layer(const verkv_cache* cache, int64_t layer,
                                           verkv_layer_config* config, size_t size,
                                           verkv_error* error);
VERKV_API verkv_code verkv_description(const verkv_cache* cache, char* text, size_t bytes,
                                       size_t* length, verkv_error* error);

/* ---- Sequences. A sequence is a number, at least 0. */

#define VERKV_NO_SEQUENCE ((int64_t)-1)

VERKV_API verkv_code verkv_create_sequence(verkv_cache* cache, int64_t* sequence,
                                           verkv_error* error);
VERKV_API verkv_code verkv_create_sequence_with_draw(verkv_cache* cache, uint64_t draw,
                                                     int64_t* sequence, verkv_error* error);
VERKV_API verkv_code verkv_fork(verkv_cache* cache, int64_t sequence, int64_t* fork,
                                verkv_error* error);
VERKV_API verkv_code verkv_erase(verkv_cache* cache, int64_t sequence, verkv_error* error);
VERKV_API verkv_code verkv_tokens(const verkv_cache* cache, int64_t sequence, int64_t layer,
                                  int64_t* tokens, verkv_error* error);
VERKV_API verkv_code verkv_compressed_tokens(const verkv_cache* cache, int64_t sequence,
                                             int64_t layer, int64_t* tokens, verkv_error* error);

/* ---- Tokens */

/* [token][head][dim]; strides in elements. Rows that are listed, TensorView::rows, stand beside a view
 * where a call takes them; the view's data and token_stride are not used then. */
typedef struct verkv_tensor_view {
  const void* data;
  int64_t type; /* VERKV_DTYPE_ */
  int64_t tokens;
  int64_t heads;
  int64_t dim;
  int64_t token_stride;
  int64_t head_stride;
} verkv_tensor_view;

/* [head][token]. */
typedef struct verkv_importance_view {
  const float* data;
  int64_t heads;
  int64_t tokens;
  int64_t head_stride;
} verkv_importance_view;

typedef struct verkv_append_batch {
  size_t size;
  const int64_t* sequences; /* [row] */
  int64_t rows;
  verkv_tensor_view keys;   /* [row][KV head][key_dim] */
  verkv_tensor_view values; /* [row][KV head][value_dim] */
  const void* const* key_rows;   /* [row], or NULL */
  const void* const* value_rows; /* [row], or NULL */
} verkv_append_batch;

typedef struct verkv_truncation {
  size_t size;
  int64_t layer;
  int64_t least_tokens;
  int32_t done;
  int32_t exact;
} verkv_truncation;

/* values: all zero where values are the first numbers of keys, here and in the calls below. */
VERKV_API verkv_code verkv_append(verkv_cache* cache, int64_t sequence, int64_t layer,
                                  const verkv_tensor_view* keys, const verkv_tensor_view* values,
                                  verkv_error* error);
VERKV_API verkv_code verkv_batch_append(verkv_cache* cache, int64_t layer,
                                        const verkv_append_batch* batch, verkv_error* error);
/* key_rows, value_rows: [token], or NULL. */
VERKV_API verkv_code verkv_move(verkv_cache* cache, int64_t sequence, int64_t layer, int64_t first,
                                const verkv_tensor_view* keys, const verkv_tensor_view* values,
                                const void* const* key_rows, const void* const* value_rows,
                                verkv_error* error);
VERKV_API verkv_code verkv_reserve(verkv_cache* cache, int64_t sequence, int64_t tokens,
                                   verkv_error* error);
/* Where the cache cannot go back as far, the call succeeds and truncation->done is false. */
VERKV_API verkv_code verkv_truncate(verkv_cache* cache, int64_t sequence, int64_t tokens,
                                    verkv_truncation* truncation, verkv_error* error);
/* One view a layer each; prompt_query_count may be 0. */
VERKV_API verkv_code verkv_compress(verkv_cache* cache, int64_t sequence,
                                    const verkv_importance_view* importance,
                                    int64_t importance_count,
                                    const verkv_tensor_view* prompt_queries,
                                    int64_t prompt_query_count, verkv_error* error);
/* left: KV heads that are left to do; 0: all is done. */
VERKV_API verkv_code verkv_begin_compress(verkv_cache* cache, int64_t sequence,
                                          const verkv_importance_view* importance,
                                          int64_t importance_count,
                                          const verkv_tensor_view* prompt_queries,
                                          int64_t prompt_query_count, int64_t* left,
                                          verkv_error* error);
VERKV_API verkv_code verkv_continue_compress(verkv_cache* cache, int64_t sequence, int64_t heads,
                                             int64_t* left, verkv_error* error);
VERKV_API verkv_code verkv_cancel_compress(verkv_cache* cache, int64_t sequence,
                                           verkv_error* error);

/* ---- Steps */

typedef struct verkv_query_head_report {
  double epsilon;
  bool certified;
  int64_t planned_tokens;
  double sketch_error;
  double output_error;
} verkv_query_head_report;

typedef struct verkv_kv_head_report {
  int64_t fetched_tokens;
  int64_t moved_tokens;
  int64_t moved_bytes;
  int64_t resident_tokens;
  bool limited;
} verkv_kv_head_report;

/* Values of row_status. */
enum { VERKV_ROW_STATUS_ANSWERED = 0, VERKV_ROW_STATUS_BAD_QUERY = 1 };

/* What is not wanted, of all after `output`, is NULL with a count of 0. Counts are exact. A step with
 * reports of another size than the library's own allocates memory for its reports. */
typedef struct verkv_attend_batch {
  size_t size;
  const int64_t* sequences; /* [row]; VERKV_NO_SEQUENCE: padding */
  int64_t rows;
  verkv_tensor_view queries; /* [row][query head][key_dim] */
  float* output;             /* [row][query head][value_dim] */
  int64_t output_count;
  float* lse; /* [row][query head] */
  int64_t lse_count;
  verkv_query_head_report* query_reports; /* [row][query head] */
  int64_t query_report_count;
  size_t query_report_size;         /* sizeof(verkv_query_head_report) */
  verkv_kv_head_report* kv_reports; /* [row][KV head] */
  int64_t kv_report_count;
  size_t kv_report_size; /* sizeof(verkv_kv_head_report) */
  uint8_t* row_status;   /* [row]; VERKV_ROW_STATUS_ */
  int64_t row_status_count;
} verkv_attend_batch;

VERKV_API verkv_code verkv_attend(verkv_cache* cache, int64_t layer,
                                  const verkv_attend_batch* batch, verkv_error* error);
VERKV_API verkv_code verkv_step(verkv_cache* cache, int64_t layer, const verkv_tensor_view* keys,
                                const verkv_tensor_view* values, const verkv_attend_batch* batch,
                                verkv_error* error);

/* ---- Exact attention over rows in the caller's memory */

/* verkv::RowAttention. Of one, one call at a time. */
typedef struct verkv_row_attention verkv_row_attention;

/* Counts are exact. What is not wanted of output, lse and values is NULL or left out as in C++. */
typedef struct verkv_row_batch {
  size_t size;
  verkv_tensor_view keys;         /* [token][KV head][key_dim] */
  verkv_tensor_view values;       /* [token][KV head][value_dim] */
  verkv_tensor_view queries;      /* [row][query head][key_dim] */
  const uint32_t* const* visible; /* [row]: the tokens that the row sees, ascending */
  const int64_t* visible_counts;  /* [row] */
  int64_t rows;
  float* output; /* [row][query head][value_dim] */
  int64_t output_count;
  float* lse; /* [row][query head], or NULL */
  int64_t lse_count;
} verkv_row_batch;

/* `attention` is NULL afterwards where the call fails. */
VERKV_API verkv_code verkv_make_row_attention(const verkv_cache_config* config,
                                              verkv_row_attention** attention, verkv_error* error);
/* Does nothing with NULL. */
VERKV_API void verkv_destroy_row_attention(verkv_row_attention* attention);
VERKV_API verkv_code verkv_attend_rows(verkv_row_attention* attention, int64_t layer,
                                       const verkv_row_batch* batch, verkv_error* error);
/* importance: [KV head][token]. */
VERKV_API verkv_code verkv_importance_of_rows(verkv_row_attention* attention, int64_t layer,
                                              const verkv_row_batch* batch, float* importance,
                                              int64_t importance_count, verkv_error* error);

/* ---- Reports */

typedef struct verkv_memory_report {
  size_t size;
  int64_t resident_bytes;
  int64_t sketch_bytes;
  int64_t metadata_bytes;
  int64_t host_bytes;
  int64_t basis_bytes;
  int64_t workspace_bytes;
  int64_t reserved_bytes;
  int64_t pageable_bytes;
  int64_t shared_bytes;
  int64_t engine_bytes;
  int64_t fast_reserved_bytes;
  int64_t host_reserved_bytes;
  int64_t file_bytes;
} verkv_memory_report;

enum { VERKV_BOUND_EDGES = 9 };
/* Edge i of the histogram of bounds, 0 <= i < VERKV_BOUND_EDGES; else NaN. */
VERKV_API double verkv_bound_edge(int32_t i);

/* verkv::sequence_bytes, of a sequence of so many tokens. All results are set; none may be NULL. */
VERKV_API verkv_code verkv_sequence_bytes(const verkv_cache_config* config, int64_t tokens,
                                          verkv_memory_report* appended,
                                          verkv_memory_report* compressed,
                                          double* mean_resident_bytes, int64_t* most_fast_bytes,
                                          int64_t* most_host_bytes, verkv_error* error);

typedef struct verkv_layer_statistics {
  size_t size;
  int64_t steps;
  int64_t decisions;
  int64_t certified;
  int64_t enlarged;
  int64_t fetching;
  int64_t planned_tokens;
  int64_t fetched_tokens;
  int64_t moved_tokens;
  int64_t moved_bytes;
  int64_t cached_tokens;
  int64_t resident_tokens;
  int64_t bounds[VERKV_BOUND_EDGES + 1];
  int64_t attend_ns;
  int64_t append_ns;
  int64_t compress_ns;
} verkv_layer_statistics;

VERKV_API verkv_code verkv_memory(const verkv_cache* cache, verkv_memory_report* report,
                                  verkv_error* error);
VERKV_API verkv_code verkv_memory_of_sequence(const verkv_cache* cache, int64_t sequence,
                                              verkv_memory_report* report, verkv_error* error);
VERKV_API verkv_code verkv_statistics(const verkv_cache* cache, verkv_layer_statistics* statistics,
                                      verkv_error* error);
VERKV_API verkv_code verkv_statistics_of_layer(const verkv_cache* cache, int64_t layer,
                                               verkv_layer_statistics* statistics,
                                               verkv_error* error);
VERKV_API verkv_code verkv_reset_statistics(verkv_cache* cache, verkv_error* error);
VERKV_API verkv_code verkv_prometheus_text(const verkv_cache* cache, char* text, size_t bytes,
                                           size_t* length, verkv_error* error);
VERKV_API verkv_code verkv_changed_row(const verkv_cache* cache, int64_t sequence, int64_t layer,
                                       int64_t* token, verkv_error* error);
VERKV_API verkv_code verkv_redraw(verkv_cache* cache, int64_t sequence, uint64_t draw,
                                  verkv_error* error);

/* ---- Saving */

/* Takes the next bytes, all of them. Returns 0, or what to call its failure. `user` is what the call was
 * given. Must not call the cache. */
typedef int64_t (*verkv_write_bytes)(void* user, const void* bytes, size_t count);
/* Fills the front of `bytes`. Returns with how many, 1 to count; 0: there are no more; below 0: what to
 * call its failure. Must not call the cache. */
typedef int64_t (*verkv_read_bytes)(void* user, void* bytes, size_t count);

/* A function that fails ends the call with VERKV_ERROR_CALLBACK. */
VERKV_API verkv_code verkv_save(const verkv_cache* cache, int64_t sequence, verkv_write_bytes write,
                                void* user, verkv_error* error);
VERKV_API verkv_code verkv_restore(verkv_cache* cache, verkv_read_bytes read, void* user,
                                   int64_t* sequence, verkv_error* error);
/* What is not wanted is NULL with 0 bytes; else the number of bytes is exact. */
VERKV_API verkv_code verkv_read(const verkv_cache* cache, int64_t sequence, int64_t layer,
                                int64_t first, int64_t count, void* keys, size_t key_bytes,
                                void* values, size_t value_bytes, verkv_error* error);

#ifdef __cplusplus
}
#endif

#endif /* VERKV_VERKV_H */
