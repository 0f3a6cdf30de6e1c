// Writes to an engine's cache that no graph shows: a state that is restored, a stream that is copied,
// a cache that is cleared or freed. They go through the functions of the cache's buffer, before
// which ours are put.
#ifndef VERKV_SRC_GGML_WATCH_HPP
#define VERKV_SRC_GGML_WATCH_HPP

#include <ggml-backend.h>
#include <ggml.h>

#include <cstddef>

namespace verkv_ggml {

// Hears of writes before they happen.
class BufferListener {
 public:
  virtual ~BufferListener() = default;
  // Bytes [offset, offset + size) of a tensor, which may be a view.
  virtual void written(const ggml_tensor* tensor, std::size_t offset, std::size_t size) = 0;
  // All tensors of the buffer.
  virtual void written_all(ggml_backend_buffer_t buffer) = 0;
  // The buffer is freed; nothing is heard of it any more.
  virtual void freed(ggml_backend_buffer_t buffer) = 0;
};

// Both may be called again for what is (not) watched. unwatch: for all buffers.
void watch(ggml_backend_buffer_t buffer, BufferListener& listener);
void unwatch(BufferListener& listener);

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_WATCH_HPP
