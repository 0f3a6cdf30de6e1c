/* The C interface, as a program in C meets it. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <verkv/verkv.h>

enum { kLayers = 3, kKvHeads = 2, kHeads = 4, kKeyDim = 32, kValueDim = 16, kPrompt = 160 };
enum {
  kRowKeys = kKvHeads * kKeyDim,
  kRowValues = kKvHeads * kValueDim,
  kRowQueries = kHeads * kKeyDim
};
enum { kRowOutput = kHeads * kValueDim };

static int failures = 0;

static void check(int holds, const char* what, int line) {
  if (holds) return;
  ++failures;
  printf("line %d: %s\n", line, what);
}
#define CHECK(condition) check((condition) != 0, #condition, __LINE__)

/* The error of the last call. */
static verkv_error error = {.size = sizeof error};

static void check_ok(verkv_code code, const char* what, int line) {
  check(code == VERKV_OK, what, line);
  if (code != VERKV_OK) printf("  %s: %s\n", verkv_code_name(code), error.text);
}
#define OK(call) check_ok(call, #call, __LINE__)

/* The call fails with `code`, and its text names `part`. */
static void check_refused(verkv_code code, verkv_code expected, const char* part, const char* what,
                          int line) {
  check(code == expected && error.code == expected && strstr(error.text, part) != NULL, what, line);
  if (code != expected || error.code != expected || strstr(error.text, part) == NULL)
    printf("  %s: %s\n", verkv_code_name(code), code == VERKV_OK ? "" : error.text);
  memset(error.text, '!', sizeof error.text);
  error.code = -1;
}
#define REFUSED(call, expected, part) check_refused(call, expected, part, #call, __LINE__)

static void check_place(int64_t layer, int64_t row, int64_t head, int64_t token, int line) {
  check(error.layer == layer && error.row == row && error.head == head && error.token == token,
        "place", line);
}
#define PLACE(layer, row, head, token) check_place(layer, row, head, token, __LINE__)

static float* numbers(int64_t count) {
  static uint32_t state = 1;
  float* all = malloc((size_t)count * sizeof *all);
  for (int64_t i = 0; i < count; ++i) {
    state = state * 1664525u + 1013904223u;
    all[i] = (float)(state >> 8) / 8388608.0f - 1.0f;
  }
  return all;
}

static verkv_tensor_view view(const float* data, int64_t tokens, int64_t heads, int64_t dim) {
  verkv_tensor_view all = {data, VERKV_DTYPE_F32, tokens, heads, dim, heads * dim, dim};
  return all;
}

static verkv_layer_config layers[kLayers];

/* Layer 1 keeps no cache. */
static verkv_cache_config configuration(void) {
  verkv_cache_config config;
  OK(verkv_cache_config_init(&config, sizeof config, &error));
  for (int i = 0; i < kLayers; ++i) {
    OK(verkv_layer_config_init(&layers[i], sizeof layers[i], &error));
    layers[i].kv_heads = kKvHeads;
    layers[i].query_heads = kHeads;
    layers[i].key_dim = kKeyDim;
    layers[i].value_dim = kValueDim;
  }
  layers[1].cached = 0;
  config.layers = layers;
  config.layer_count = kLayers;
  config.keep = 0.25;
  config.local_tokens = 8;
  config.sink_tokens = 2;
  config.compress_from.has_value = 1;
  config.threads.has_value = 1;
  config.threads.value = 1;
  return config;
}

static void append(verkv_cache* cache, int64_t sequence, int64_t tokens) {
  float* const keys = numbers(tokens * kRowKeys);
  float* const values = numbers(tokens * kRowValues);
  const verkv_tensor_view k = view(keys, tokens, kKvHeads, kKeyDim);
  const verkv_tensor_view v = view(values, tokens, kKvHeads, kValueDim);
  for (int64_t layer = 0; layer < kLayers; layer += 2)
    OK(verkv_append(cache, sequence, layer, &k, &v, &error));
  free(keys);
  free(values);
}

static void compress(verkv_cache* cache, int64_t sequence, int64_t tokens) {
  float* const scores = numbers(kKvHeads * tokens);
  float* const queries = numbers(8 * kRowQueries);
  verkv_importance_view importance[kLayers];
  verkv_tensor_view prompt[kLayers];
  for (int64_t i = 0; i < kKvHeads * tokens; ++i) scores[i] = fabsf(scores[i]);
  for (int i = 0; i < kLayers; ++i) {
    const verkv_importance_view one = {scores, kKvHeads, tokens, tokens};
    importance[i] = one;
    prompt[i] = view(queries, 8, kHeads, kKeyDim);
  }
  REFUSED(verkv_compress(cache, sequence, importance, kLayers - 1, NULL, 0, &error),
          VERKV_ERROR_SHAPE, "3");
  REFUSED(verkv_compress(cache, sequence, NULL, kLayers, NULL, 0, &error), VERKV_ERROR_SHAPE,
          "NULL");
  OK(verkv_compress(cache, sequence, importance, kLayers, prompt, kLayers, &error));
  free(scores);
  free(queries);
}

/* A cache with one compressed sequence. */
static verkv_cache* filled_cache(int64_t* sequence) {
  const verkv_cache_config config = configuration();
  verkv_cache* cache = NULL;
  OK(verkv_make_cpu_cache(&config, &cache, &error));
  OK(verkv_create_sequence_with_draw(cache, 7, sequence, &error));
  append(cache, *sequence, kPrompt);
  compress(cache, *sequence, kPrompt);
  return cache;
}

/* A step of two rows, which another one is not to disturb. */
struct step {
  int64_t sequences[2];
  float* queries;
  float output[2 * kRowOutput];
  float lse[2 * kHeads];
  verkv_query_head_report heads[2 * kHeads];
  verkv_kv_head_report kv[2 * kKvHeads];
  uint8_t status[2];
  verkv_attend_batch batch;
};

static void prepare(struct step* step, int64_t first, int64_t second) {
  verkv_attend_batch batch = {.size = sizeof batch};
  memset(step, 0, sizeof *step);
  step->sequences[0] = first;
  step->sequences[1] = second;
  step->queries = numbers(2 * kRowQueries);
  batch.sequences = step->sequences;
  batch.rows = 2;
  batch.queries = view(step->queries, 2, kHeads, kKeyDim);
  batch.output = step->output;
  batch.output_count = 2 * kRowOutput;
  batch.lse = step->lse;
  batch.lse_count = 2 * kHeads;
  batch.query_reports = step->heads;
  batch.query_report_count = 2 * kHeads;
  batch.query_report_size = sizeof step->heads[0];
  batch.kv_reports = step->kv;
  batch.kv_report_count = 2 * kKvHeads;
  batch.kv_report_size = sizeof step->kv[0];
  batch.row_status = step->status;
  batch.row_status_count = 2;
  step->batch = batch;
}

/* ---- What is saved, in memory */

struct file {
  unsigned char* bytes;
  size_t count, at;
  size_t fail_after; /* a call that would come to more bytes fails */
};

static int64_t write_file(void* user, const void* bytes, size_t count) {
  struct file* const file = user;
  if (file->count + count > file->fail_after) return 42;
  file->bytes = realloc(file->bytes, file->count + count);
  memcpy(file->bytes + file->count, bytes, count);
  file->count += count;
  return 0;
}

static int64_t read_file(void* user, void* bytes, size_t count) {
  struct file* const file = user;
  const size_t left = file->count - file->at;
  if (file->at + count > file->fail_after) return -43;
  if (count > left) count = left;
  memcpy(bytes, file->bytes + file->at, count);
  file->at += count;
  return (int64_t)count;
}

static int64_t read_too_much(void* user, void* bytes, size_t count) {
  (void)user;
  (void)bytes;
  return (int64_t)count + 1;
}

/* ---- The tests */

static void steps(verkv_cache* cache, int64_t sequence, int64_t fork) {
  struct step one, two;
  float* const keys = numbers(2 * kRowKeys);
  float* const values = numbers(2 * kRowValues);
  const verkv_tensor_view k = view(keys, 2, kKvHeads, kKeyDim);
  const verkv_tensor_view v = view(values, 2, kKvHeads, kValueDim);
  verkv_append_batch rows = {.size = sizeof rows};
  verkv_layer_statistics statistics = {.size = sizeof statistics};
  int64_t tokens = 0;

  prepare(&one, sequence, fork);
  one.queries[kRowQueries] = NAN;
  OK(verkv_reserve(cache, sequence, 1, &error));
  OK(verkv_step(cache, 0, &k, &v, &one.batch, &error));
  CHECK(one.status[0] == VERKV_ROW_STATUS_ANSWERED && one.status[1] == VERKV_ROW_STATUS_BAD_QUERY);
  CHECK(one.lse[0] > 0 && isinf(one.lse[kHeads]) && one.output[0] != 0 &&
        one.output[kRowOutput] == 0);
  CHECK(one.heads[0].planned_tokens > 0 && one.kv[0].resident_tokens > 0);
  OK(verkv_tokens(cache, fork, 0, &tokens, &error));
  CHECK(tokens == kPrompt + 1);

  rows.sequences = one.sequences;
  rows.rows = 2;
  rows.keys = k;
  rows.values = v;
  OK(verkv_batch_append(cache, 2, &rows, &error));
  OK(verkv_tokens(cache, sequence, 2, &tokens, &error));
  CHECK(tokens == kPrompt + 1);

  /* Attending again gives the same; the padding row's neighbour as well. */
  prepare(&two, sequence, VERKV_NO_SEQUENCE);
  memcpy(two.queries, one.queries, kRowQueries * sizeof(float));
  two.batch.lse = NULL;
  two.batch.lse_count = 0;
  OK(verkv_attend(cache, 0, &two.batch, &error));
  CHECK(memcmp(one.output, two.output, kRowOutput * sizeof(float)) == 0);
  CHECK(one.heads[1].epsilon == two.heads[1].epsilon &&
        one.heads[1].certified == two.heads[1].certified);

  OK(verkv_statistics_of_layer(cache, 0, &statistics, &error));
  CHECK(statistics.steps == 2 && statistics.decisions == 2 * kHeads && statistics.attend_ns > 0);
  CHECK(statistics.bounds[0] <= statistics.decisions);
  OK(verkv_statistics(cache, &statistics, &error));
  CHECK(statistics.steps == 2);
  OK(verkv_reset_statistics(cache, &error));
  OK(verkv_statistics(cache, &statistics, &error));
  CHECK(statistics.steps == 0 && statistics.size == sizeof statistics);
  free(one.queries);
  free(two.queries);
  free(keys);
  free(values);
}

static void saving(verkv_cache* cache, int64_t sequence) {
  struct file file = {NULL, 0, 0, SIZE_MAX};
  int64_t copy = -5, tokens = 0;
  struct step one, two;
  uint16_t keys[4 * kRowKeys], again[4 * kRowKeys], values[4 * kRowValues];

  OK(verkv_save(cache, sequence, write_file, &file, &error));
  OK(verkv_restore(cache, read_file, &file, &copy, &error));
  CHECK(copy >= 0 && copy != sequence);
  OK(verkv_tokens(cache, copy, 2, &tokens, &error));
  CHECK(tokens == kPrompt + 1);
  prepare(&one, sequence, copy);
  memcpy(one.queries + kRowQueries, one.queries, kRowQueries * sizeof(float));
  OK(verkv_attend(cache, 0, &one.batch, &error));
  CHECK(memcmp(one.output, one.output + kRowOutput, kRowOutput * sizeof(float)) == 0);

  OK(verkv_read(cache, sequence, 0, 3, 4, keys, sizeof keys, values, sizeof values, &error));
  OK(verkv_read(cache, copy, 0, 3, 4, again, sizeof again, NULL, 0, &error));
  CHECK(memcmp(keys, again, sizeof keys) == 0);
  REFUSED(verkv_read(cache, copy, 0, 3, 4, again, sizeof again - 2, NULL, 0, &error),
          VERKV_ERROR_SHAPE, "keys");
  REFUSED(verkv_read(cache, copy, 0, 3, 4, NULL, sizeof again, NULL, 0, &error), VERKV_ERROR_SHAPE,
          "NULL");

  /* Another sample of the same tokens. */
  OK(verkv_redraw(cache, copy, 99, &error));
  prepare(&two, copy, VERKV_NO_SEQUENCE);
  memcpy(two.queries, one.queries, kRowQueries * sizeof(float));
  OK(verkv_attend(cache, 0, &two.batch, &error));
  CHECK(memcmp(one.output, two.output, kRowOutput * sizeof(float)) != 0);
  OK(verkv_erase(cache, copy, &error));
  REFUSED(verkv_erase(cache, copy, &error), VERKV_ERROR_UNKNOWN_SEQUENCE, "unknown");

  /* Functions that fail. */
  copy = -5;
  file.at = 0;
  file.fail_after = file.count / 2;
  REFUSED(verkv_restore(cache, read_file, &file, &copy, &error), VERKV_ERROR_CALLBACK, "read");
  CHECK(error.callback_status == -43 && copy == -5);
  REFUSED(verkv_restore(cache, read_too_much, NULL, &copy, &error), VERKV_ERROR_CALLBACK,
          "more bytes");
  REFUSED(verkv_restore(cache, NULL, NULL, &copy, &error), VERKV_ERROR_SHAPE, "NULL");
  file.fail_after = file.count + 10;
  REFUSED(verkv_save(cache, sequence, write_file, &file, &error), VERKV_ERROR_CALLBACK, "write");
  CHECK(error.callback_status == 42);
  REFUSED(verkv_save(cache, sequence, NULL, NULL, &error), VERKV_ERROR_SHAPE, "NULL");
  file.at = 0;
  file.bytes[0] ^= 1;
  file.fail_after = SIZE_MAX;
  REFUSED(verkv_restore(cache, read_file, &file, &copy, &error), VERKV_ERROR_FORMAT, "");
  free(file.bytes);
  free(one.queries);
  free(two.queries);
}

static void life(void) {
  int64_t sequence = -1, fork = -1, other = -1, tokens = 0;
  verkv_cache* const cache = filled_cache(&sequence);
  verkv_memory_report memory = {.size = sizeof memory};
  verkv_truncation truncation = {.size = sizeof truncation};
  verkv_cache_config config = {.size = sizeof config};
  verkv_layer_config layer;
  char text[64];
  size_t length = 0;
  char* all;

  OK(verkv_config(cache, &config, &error));
  CHECK(config.layers == NULL && config.layer_count == kLayers && config.local_tokens == 8);
  OK(verkv_config_of_layer(cache, 1, &layer, sizeof layer, &error));
  CHECK(layer.value_dim == kValueDim && layer.cached == 0);
  REFUSED(verkv_config_of_layer(cache, 3, &layer, sizeof layer, &error), VERKV_ERROR_UNKNOWN_LAYER,
          "3");
  OK(verkv_description(cache, text, sizeof text, NULL, &error));
  CHECK(strncmp(text, "cpu", 3) == 0);

  OK(verkv_compressed_tokens(cache, sequence, 0, &tokens, &error));
  CHECK(tokens == kPrompt - 8);
  OK(verkv_fork(cache, sequence, &fork, &error));
  steps(cache, sequence, fork);
  OK(verkv_memory(cache, &memory, &error));
  CHECK(memory.host_bytes > 0 && memory.sketch_bytes > 0 && memory.shared_bytes == 0);
  OK(verkv_memory_of_sequence(cache, fork, &memory, &error));
  CHECK(memory.shared_bytes > 0);

  OK(verkv_prometheus_text(cache, NULL, 0, &length, &error));
  all = malloc(length + 1);
  OK(verkv_prometheus_text(cache, all, length + 1, NULL, &error));
  CHECK(strlen(all) == length && strstr(all, "verkv_") != NULL);
  OK(verkv_prometheus_text(cache, text, sizeof text, &length, &error));
  CHECK(strlen(text) == sizeof text - 1 && length > sizeof text &&
        strncmp(text, all, sizeof text - 1) == 0);
  free(all);

  saving(cache, sequence);
  OK(verkv_truncate(cache, fork, kPrompt, &truncation, &error));
  CHECK(truncation.done == 1 && truncation.exact == 1 && truncation.layer == -1);
  OK(verkv_tokens(cache, fork, 0, &tokens, &error));
  CHECK(tokens == kPrompt);
  OK(verkv_truncate(cache, fork, 100, &truncation, &error));
  CHECK(truncation.done == 1 && truncation.exact == 0 && truncation.layer == 0 &&
        truncation.least_tokens == kPrompt - 8);
  OK(verkv_create_sequence(cache, &other, &error));
  CHECK(other != sequence && other != fork);
  OK(verkv_erase(cache, sequence, &error));
  verkv_destroy(cache);
  verkv_destroy(NULL);
}

static void misuse_of_batches(verkv_cache* cache, int64_t sequence) {
  struct step step;
  verkv_attend_batch batch;
  prepare(&step, sequence, VERKV_NO_SEQUENCE);

  batch = step.batch;
  REFUSED(verkv_attend(NULL, 0, &batch, &error), VERKV_ERROR_SHAPE, "NULL");
  REFUSED(verkv_attend(cache, 0, NULL, &error), VERKV_ERROR_SHAPE, "NULL");
  REFUSED(verkv_attend(cache, 1, &batch, &error), VERKV_ERROR_UNKNOWN_LAYER, "layer 1");
  batch.rows = -1;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_SHAPE, "-1");
  batch = step.batch;
  batch.output = NULL;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_SHAPE, "output");
  batch = step.batch;
  batch.output_count -= 1;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_SHAPE, "output");
  batch = step.batch;
  batch.query_report_size = 0;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_SHAPE, "query_reports");
  batch = step.batch;
  batch.kv_report_count = 1;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_SHAPE, "KV");
  batch = step.batch;
  batch.queries.type = 256 + VERKV_DTYPE_F32;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_SHAPE, "256");
  batch = step.batch;
  step.sequences[1] = 1234;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_UNKNOWN_SEQUENCE, "1234");
  PLACE(0, 1, -1, -1);
  step.sequences[1] = VERKV_NO_SEQUENCE;
  batch.row_status = NULL;
  batch.row_status_count = 0;
  step.queries[2 * kKeyDim] = INFINITY;
  REFUSED(verkv_attend(cache, 0, &batch, &error), VERKV_ERROR_NUMBER, "inf");
  PLACE(0, 0, 2, -1);
  free(step.queries);
}

static void misuse(void) {
  int64_t sequence = -1, number = -5;
  verkv_cache* const cache = filled_cache(&sequence);
  float* const keys = numbers(2 * kRowKeys);
  float* const values = numbers(2 * kRowValues);
  verkv_tensor_view k = view(keys, 2, kKvHeads, kKeyDim), v = view(values, 2, kKvHeads, kValueDim);
  verkv_memory_report memory = {.size = 0};
  verkv_truncation truncation = {.size = sizeof truncation};
  verkv_error small = {.size = 0};

  REFUSED(verkv_create_sequence(NULL, &number, &error), VERKV_ERROR_SHAPE, "cache is NULL");
  PLACE(-1, -1, -1, -1);
  REFUSED(verkv_create_sequence(cache, NULL, &error), VERKV_ERROR_SHAPE, "NULL");
  REFUSED(verkv_fork(cache, 77, &number, &error), VERKV_ERROR_UNKNOWN_SEQUENCE, "77");
  REFUSED(verkv_tokens(cache, sequence, 9, &number, &error), VERKV_ERROR_UNKNOWN_LAYER, "9");
  REFUSED(verkv_append(cache, sequence, 0, NULL, &v, &error), VERKV_ERROR_SHAPE, "keys is NULL");
  REFUSED(verkv_append(cache, sequence, 0, &v, &k, &error), VERKV_ERROR_SHAPE, "keys");
  keys[kRowKeys + kKeyDim] = NAN;
  REFUSED(verkv_append(cache, sequence, 2, &k, &v, &error), VERKV_ERROR_NUMBER, "nan");
  PLACE(2, -1, 1, 1);
  k.data = NULL;
  REFUSED(verkv_append(cache, sequence, 2, &k, &v, &error), VERKV_ERROR_SHAPE, "null");
  REFUSED(verkv_reserve(cache, sequence, -3, &error), VERKV_ERROR_SHAPE, "-3");
  REFUSED(verkv_truncate(cache, sequence, kPrompt + 1, &truncation, &error), VERKV_ERROR_SHAPE,
          "161");
  REFUSED(verkv_truncate(cache, sequence, 0, NULL, &error), VERKV_ERROR_SHAPE, "NULL");
  REFUSED(verkv_memory(cache, NULL, &error), VERKV_ERROR_SHAPE, "NULL");
  REFUSED(verkv_memory(cache, &memory, &error), VERKV_ERROR_SHAPE, "size of 0");
  REFUSED(verkv_description(cache, NULL, 5, NULL, &error), VERKV_ERROR_SHAPE, "NULL");
  REFUSED(verkv_description(cache, NULL, 0, NULL, &error), VERKV_ERROR_SHAPE, "NULL");
  misuse_of_batches(cache, sequence);

  /* Without an error, and with one that cannot be one. */
  CHECK(verkv_erase(cache, 77, NULL) == VERKV_ERROR_UNKNOWN_SEQUENCE);
  CHECK(verkv_erase(cache, sequence, &small) == VERKV_ERROR_SHAPE && small.text[0] == 0);
  /* None of it has changed anything. */
  OK(verkv_tokens(cache, sequence, 2, &number, &error));
  CHECK(number == kPrompt);
  CHECK(isnan(verkv_bound_edge(-1)) && isnan(verkv_bound_edge(VERKV_BOUND_EDGES)) &&
        verkv_bound_edge(8) == 3);
  CHECK(verkv_version() == VERKV_VERSION);
  free(keys);
  free(values);
  verkv_destroy(cache);
}

static void settings(void) {
  verkv_cache_config config = configuration();
  verkv_cache* cache = (verkv_cache*)&config;
  char text[512];
  size_t length = 1;
  double keep = 0;
  int64_t sequence = -1;

  OK(verkv_unsupported_reasons(&config, text, sizeof text, &length, &error));
  CHECK(length == 0 && text[0] == 0);
  config.keep = 2;
  config.fetch_delta = -1;
  layers[2].window.has_value = 1;
  layers[2].window.value = -512;
  OK(verkv_unsupported_reasons(&config, text, sizeof text, &length, &error));
  CHECK(strstr(text, "delta -1") != NULL && strstr(text, "\nlayer 2") == NULL &&
        strstr(text, "-512") != NULL);
  CHECK(strlen(text) == length && text[length - 1] == '\n');
  REFUSED(verkv_make_cpu_cache(&config, &cache, &error), VERKV_ERROR_SETTING, "delta");
  CHECK(cache == NULL);
  REFUSED(verkv_make_cpu_cache(NULL, &cache, &error), VERKV_ERROR_SHAPE, "NULL");
  REFUSED(verkv_make_cpu_cache(&config, NULL, &error), VERKV_ERROR_SHAPE, "NULL");

  OK(verkv_keep_for_fast_share(0.5, layers, sizeof layers[0], VERKV_DTYPE_F16,
                               VERKV_SKETCH_KIND_EXACT, 2, VERKV_ESTIMATOR_PLAIN, &keep, &error));
  CHECK(keep > 0.4 && keep <= 0.5);

  config = configuration();
  config.pool = 256;
  REFUSED(verkv_make_cpu_cache(&config, &cache, &error), VERKV_ERROR_SETTING, "pool 256");
  config = configuration();
  config.threads.value = (int64_t)1 << 32;
  REFUSED(verkv_make_cpu_cache(&config, &cache, &error), VERKV_ERROR_SETTING, "threads 4294967296");
  config = configuration();
  config.layers = NULL;
  REFUSED(verkv_make_cpu_cache(&config, &cache, &error), VERKV_ERROR_SHAPE, "layers");
  config = configuration();
  config.layer_size = 0;
  REFUSED(verkv_make_cpu_cache(&config, &cache, &error), VERKV_ERROR_SHAPE, "layer");

  config = configuration();
  config.host_bytes_limit.has_value = 1;
  config.host_bytes_limit.value = 1000;
  OK(verkv_make_cpu_cache(&config, &cache, &error));
  OK(verkv_create_sequence(cache, &sequence, &error));
  REFUSED(verkv_reserve(cache, sequence, 1000, &error), VERKV_ERROR_HOST_LIMIT, "1000");
  verkv_destroy(cache);
}

/* The caller's threads: here one, which counts what it is given. */
static void run_parts(void* user, int32_t parts, verkv_part part, void* argument) {
  for (int32_t i = parts - 1; i >= 0; --i) part(argument, i);
  *(int64_t*)user += parts;
}

static void executor(void) {
  verkv_cache_config config = configuration(), seen = {.size = sizeof seen};
  verkv_cache *cache = NULL, *plain = NULL;
  struct step step;
  int64_t sequence = -1, other = -1, parts = 0;
  plain = filled_cache(&other);
  config.threads.value = 3;
  config.executor = run_parts;
  config.executor_user = &parts;
  OK(verkv_make_cpu_cache(&config, &cache, &error));
  OK(verkv_config(cache, &seen, &error));
  CHECK(seen.executor == run_parts && seen.executor_user == &parts && seen.threads.value == 3);
  OK(verkv_config(plain, &seen, &error));
  CHECK(seen.executor == NULL && seen.executor_user == NULL);
  OK(verkv_create_sequence_with_draw(cache, 7, &sequence, &error));
  append(cache, sequence, kPrompt);
  compress(cache, sequence, kPrompt);
  prepare(&step, sequence, sequence);
  OK(verkv_attend(cache, 0, &step.batch, &error));
  CHECK(parts > 0 && step.lse[0] > 0);
  free(step.queries);
  verkv_destroy(cache);
  verkv_destroy(plain);
}

/* Structures of programs that were compiled with an older or a newer header. */
static void sizes_of_configurations(void) {
  struct {
    verkv_cache_config known;
    int64_t later;
  } newer;
  struct {
    verkv_layer_config known;
    int64_t later;
  } newer_layers[2];
  verkv_cache_config config = configuration(), seen = {.size = sizeof seen};
  verkv_cache* cache = NULL;

  /* The rest of an older one is not looked at. */
  config.study_cap.value = -5;
  REFUSED(verkv_make_cpu_cache(&config, &cache, &error), VERKV_ERROR_SETTING, "cap");
  config.size = offsetof(verkv_cache_config, study_select);
  OK(verkv_make_cpu_cache(&config, &cache, &error));
  OK(verkv_config(cache, &seen, &error));
  CHECK(seen.study_select == VERKV_SELECTION_SPREAD && seen.study_cap.value == 2);
  verkv_destroy(cache);

  CHECK(verkv_cache_config_init(&newer.known, sizeof newer, &error) == VERKV_OK &&
        newer.later == 0);
  CHECK(newer.known.size == sizeof newer);
  OK(verkv_layer_config_init(&newer_layers[0].known, sizeof newer_layers[0], &error));
  CHECK(newer_layers[0].later == 0);
  newer_layers[0].known = layers[0];
  newer_layers[1] = newer_layers[0];
  newer_layers[1].known.key_dim = 48;
  newer.known.layers = &newer_layers[0].known;
  newer.known.layer_count = 2;
  newer.known.layer_size = sizeof newer_layers[0];
  newer.known.threads.has_value = 1;
  newer.known.threads.value = 1;
  OK(verkv_make_cpu_cache(&newer.known, &cache, &error));
  OK(verkv_config_of_layer(cache, 1, &newer_layers[0].known, sizeof newer_layers[0], &error));
  CHECK(newer_layers[0].known.key_dim == 48);
  verkv_destroy(cache);
  newer_layers[1].later = 1;
  REFUSED(verkv_make_cpu_cache(&newer.known, &cache, &error), VERKV_ERROR_SHAPE, "a layer");
  newer_layers[1].later = 0;
  newer.later = 1;
  REFUSED(verkv_make_cpu_cache(&newer.known, &cache, &error), VERKV_ERROR_SHAPE,
          "verkv_cache_config");
}

static void sizes(void) {
  struct {
    verkv_memory_report known;
    int64_t later;
  } memory = {.known = {.size = sizeof memory}, .later = 9};
  struct {
    verkv_query_head_report known;
    int64_t later;
  } heads[2 * kHeads];
  int64_t old[2 * kKvHeads][2]; /* fetched_tokens and moved_tokens */
  struct {
    verkv_error known;
    int64_t later;
  } newer = {.known = {.size = sizeof newer}, .later = 9};
  verkv_error older = {.size = offsetof(verkv_error, text) + 8};
  int64_t sequence = -1;
  verkv_cache* const cache = filled_cache(&sequence);
  struct step step, plain;
  int all_kv = 1;

  OK(verkv_memory(cache, &memory.known, &error));
  CHECK(memory.later == 0 && memory.known.host_bytes > 0 && memory.known.size == sizeof memory);
  memory.known.size = offsetof(verkv_memory_report, host_bytes);
  memory.known.host_bytes = -9;
  OK(verkv_memory(cache, &memory.known, &error));
  CHECK(memory.known.host_bytes == -9);

  prepare(&plain, sequence, VERKV_NO_SEQUENCE);
  prepare(&step, sequence, VERKV_NO_SEQUENCE);
  memcpy(step.queries, plain.queries, kRowQueries * sizeof(float));
  OK(verkv_attend(cache, 0, &plain.batch, &error));
  memset(heads, 1, sizeof heads);
  step.batch.query_reports = &heads[0].known;
  step.batch.query_report_size = sizeof heads[0];
  step.batch.kv_reports = (verkv_kv_head_report*)(void*)old;
  step.batch.kv_report_size = sizeof old[0];
  OK(verkv_attend(cache, 0, &step.batch, &error));
  for (int h = 0; h < kHeads; ++h) {
    CHECK(heads[h].known.epsilon == plain.heads[h].epsilon && heads[h].later == 0);
    CHECK(heads[h].known.output_error == plain.heads[h].output_error);
    CHECK(heads[h].known.planned_tokens > 0);
  }
  for (int h = 0; h < 2 * kKvHeads; ++h)
    all_kv &= old[h][0] == plain.kv[h].fetched_tokens && old[h][1] == plain.kv[h].moved_tokens;
  CHECK(all_kv);

  memset(older.text, '!', sizeof older.text);
  CHECK(verkv_erase(cache, 77, &older) == VERKV_ERROR_UNKNOWN_SEQUENCE);
  CHECK(strcmp(older.text, "sequenc") == 0 && older.text[8] == '!');
  CHECK(verkv_erase(cache, 77, &newer.known) == VERKV_ERROR_UNKNOWN_SEQUENCE && newer.later == 0);
  CHECK(newer.known.size == sizeof newer && strstr(newer.known.text, "77") != NULL);
  free(plain.queries);
  free(step.queries);
  verkv_destroy(cache);
}

int main(void) {
  life();
  misuse();
  settings();
  executor();
  sizes_of_configurations();
  sizes();
  if (failures > 0) printf("%d checks failed\n", failures);
  return failures > 0;
}
