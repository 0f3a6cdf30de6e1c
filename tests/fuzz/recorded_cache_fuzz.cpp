// The reader of recorded caches: any bytes are a recording, all of whose numbers can be read, or end
// in a FormatError.
#include <cmath>
#include <cstdint>
#include <string>

#include <verkv/recorded_cache.hpp>

#include "fuzz/fuzz.hpp"
#include "support/safetensors_writer.hpp"

namespace {

using verkv::fuzz::require;

void read_all(const verkv::TensorView& view) {
  for (std::int64_t t = 0; t < view.tokens; ++t) {
    for (std::int64_t h = 0; h < view.heads; ++h) {
      for (std::int64_t j = 0; j < view.dim; ++j) {
        const float x = verkv::with_element(view.type, [&](auto element) {
          std::memcpy(&element, static_cast<const decltype(element)*>(view.row(t, h)) + j,
                      sizeof element);
          return verkv::to_float(element);
        });
        require(std::isfinite(x), "a number of a recording is finite");
      }
    }
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const verkv::test::TemporaryFile file("verkv-fuzz");
  file.write(std::string(reinterpret_cast<const char*>(data), size));
  try {
    const auto cache = verkv::RecordedCache::load(file.path());
    require(!cache.layers().empty(), "a recording has a layer");
    for (const verkv::RecordedLayer& layer : cache.layers()) {
      require(layer.query_heads % layer.kv_heads == 0, "query heads are shared out evenly");
      require(layer.key.tokens == cache.prompt_tokens(), "layers are equally long");
      require(layer.query.tokens == cache.steps(), "layers have equally many steps");
      for (const verkv::TensorView* view :
           {&layer.key, &layer.value, &layer.query, &layer.new_key, &layer.new_value}) {
        read_all(*view);
      }
      if (layer.prompt_query.data != nullptr) read_all(layer.prompt_query);
      for (const auto& [name, scores] : layer.importance) {
        for (std::int64_t h = 0; h < scores.heads; ++h) {
          for (std::int64_t t = 0; t < scores.tokens; ++t) {
            const float x = scores.data[h * scores.head_stride + t];
            require(x >= 0 && std::isfinite(x), "an importance is finite and not negative");
          }
        }
      }
    }
  } catch (const verkv::FormatError&) {
  }
  return 0;
}
