/* An engine in C, without an engine: a made-up model prefills, decodes, forks and saves through the
 * cache. Exits with 1 where a call fails. The loop in C++, with a dense twin: decode_loop/main.cpp. */
#include <stdio.h>
#include <stdlib.h>

#include <verkv/verkv.h>

enum { kLayers = 2, kKvHeads = 2, kHeads = 8, kDim = 64, kPrompt = 2048, kSteps = 20 };

static verkv_error error = {.size = sizeof error};

static void need(verkv_code code) {
  if (code == VERKV_OK) return;
  printf("%s at layer %lld, token %lld: %s\n", verkv_code_name(code), (long long)error.layer,
         (long long)error.token, error.text);
  exit(1);
}

/* Stands for the model: rows [token][head][kDim]. */
static verkv_tensor_view rows(float* to, int64_t tokens, int64_t heads) {
  const verkv_tensor_view view = {to, VERKV_DTYPE_F32, tokens, heads, kDim, heads * kDim, kDim};
  for (int64_t i = 0; i < tokens * heads * kDim; ++i)
    to[i] = 2.0f * (float)rand() / (float)RAND_MAX - 1.0f;
  return view;
}

/* For verkv_save: no bytes are kept, they are counted. */
static int64_t count_bytes(void* user, const void* bytes, size_t count) {
  (void)bytes;
  *(size_t*)user += count;
  return 0;
}

int main(void) {
  static float keys[kPrompt * kKvHeads * kDim], values[kPrompt * kKvHeads * kDim];
  static float queries[kHeads * kDim], output[kHeads * kDim], scores[kKvHeads * kPrompt];
  verkv_layer_config layers[kLayers];
  verkv_importance_view importance[kLayers];
  verkv_cache_config config;
  need(verkv_cache_config_init(&config, sizeof config, &error));
  for (int layer = 0; layer < kLayers; ++layer) {
    need(verkv_layer_config_init(&layers[layer], sizeof layers[layer], &error));
    layers[layer].kv_heads = kKvHeads;
    layers[layer].query_heads = kHeads;
    layers[layer].key_dim = layers[layer].value_dim = kDim;
  }
  config.layers = layers;
  config.layer_count = kLayers;
  config.keep = 1.0 / 8;
  config.fetch_epsilon = (verkv_optional_double){1, 0.1};
  config.fetch_limit_tokens = (verkv_optional_int64){1, 100};

  verkv_cache* cache;
  int64_t sequence, fork;
  char text[200];
  /* The text has the reasons, if there are any. */
  need(verkv_make_cpu_cache(&config, &cache, &error));
  need(verkv_description(cache, text, sizeof text, NULL, &error));
  printf("%s\n", text);

  /* Prefill; then the scores that the engine has found for its tokens, here all alike. */
  need(verkv_create_sequence(cache, &sequence, &error));
  for (int i = 0; i < kKvHeads * kPrompt; ++i) scores[i] = 1;
  for (int layer = 0; layer < kLayers; ++layer) {
    const verkv_tensor_view k = rows(keys, kPrompt, kKvHeads), v = rows(values, kPrompt, kKvHeads);
    need(verkv_append(cache, sequence, layer, &k, &v, &error));
    importance[layer] = (verkv_importance_view){scores, kKvHeads, kPrompt, kPrompt};
  }
  need(verkv_compress(cache, sequence, importance, kLayers, NULL, 0, &error));

  /* Decode: make room once a step, then append and attend layer by layer. */
  for (int step = 0; step < kSteps; ++step) {
    need(verkv_reserve(cache, sequence, 1, &error));
    for (int layer = 0; layer < kLayers; ++layer) {
      const verkv_tensor_view k = rows(keys, 1, kKvHeads), v = rows(values, 1, kKvHeads);
      verkv_attend_batch batch = {.size = sizeof batch, .sequences = &sequence, .rows = 1};
      batch.queries = rows(queries, 1, kHeads);
      batch.output = output;
      batch.output_count = kHeads * kDim;
      need(verkv_step(cache, layer, &k, &v, &batch, &error));
    }
  }

  size_t saved = 0;
  verkv_layer_statistics statistics = {.size = sizeof statistics};
  need(verkv_fork(cache, sequence, &fork, &error));
  need(verkv_erase(cache, sequence, &error));
  need(verkv_save(cache, fork, count_bytes, &saved, &error));
  need(verkv_statistics(cache, &statistics, &error));
  printf("%lld decisions, %lld certified; %lld tokens moved; saved in %zu bytes\n",
         (long long)statistics.decisions, (long long)statistics.certified,
         (long long)statistics.moved_tokens, saved);
  verkv_destroy(cache);
  return statistics.decisions != kSteps * kLayers * kHeads;
}
