#include <stdio.h>

#include <verkv/verkv.h>

/* The header is that of the library, and a cache can be made and asked. */
int main(void) {
  verkv_error error = {.size = sizeof error};
  verkv_layer_config layer;
  verkv_cache_config config;
  verkv_cache* cache;
  int64_t sequence, tokens = -1;
  if (verkv_version() != VERKV_VERSION) return 1;
  if (verkv_layer_config_init(&layer, sizeof layer, &error) != VERKV_OK) return 1;
  if (verkv_cache_config_init(&config, sizeof config, &error) != VERKV_OK) return 1;
  layer.key_dim = layer.value_dim = 64;
  config.layers = &layer;
  config.layer_count = 1;
  if (verkv_make_cpu_cache(&config, &cache, &error) != VERKV_OK) {
    printf("%s\n", error.text);
    return 1;
  }
  if (verkv_create_sequence(cache, &sequence, &error) != VERKV_OK) return 1;
  if (verkv_tokens(cache, sequence, 0, &tokens, &error) != VERKV_OK || tokens != 0) return 1;
  if (verkv_erase(cache, 12345, &error) != VERKV_ERROR_UNKNOWN_SEQUENCE) return 1;
  verkv_destroy(cache);
  return 0;
}
