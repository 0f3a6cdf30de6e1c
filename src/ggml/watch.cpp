#include "watch.hpp"

#include <ggml-backend-impl.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace verkv_ggml {
namespace {

struct Watched {
  ggml_backend_buffer_i original = {};
  std::vector<BufferListener*> listeners;
};

// Functions of a buffer have no place for what is ours.
struct Table {
  std::mutex mutex;
  std::map<ggml_backend_buffer_t, Watched> buffers;
};

Table& table() {
  static Table table;
  return table;
}

Watched find(ggml_backend_buffer_t buffer) {
  const std::lock_guard lock(table().mutex);
  return table().buffers.at(buffer);
}

// The buffer's own functions, after everybody has heard.
template <class Tell>
ggml_backend_buffer_i told(ggml_backend_buffer_t buffer, Tell&& tell) {
  const Watched watched = find(buffer);
  for (BufferListener* listener : watched.listeners) tell(*listener);
  return watched.original;
}

void set_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data,
                std::size_t offset, std::size_t size) {
  told(buffer, [&](BufferListener& listener) {
    listener.written(tensor, offset, size);
  }).set_tensor(buffer, tensor, data, offset, size);
}

void set_tensor_2d(ggml_backend_buffer_t buffer, ggml_tensor* tensor, const void* data,
                   std::size_t offset, std::size_t size, std::size_t copies,
                   std::size_t tensor_stride, std::size_t data_stride) {
  told(buffer, [&](BufferListener& listener) {
    for (std::size_t i = 0; i < copies; ++i)
      listener.written(tensor, offset + i * tensor_stride, size);
  }).set_tensor_2d(buffer, tensor, data, offset, size, copies, tensor_stride, data_stride);
}

void memset_tensor(ggml_backend_buffer_t buffer, ggml_tensor* tensor, std::uint8_t value,
                   std::size_t offset, std::size_t size) {
  told(buffer, [&](BufferListener& listener) {
    listener.written(tensor, offset, size);
  }).memset_tensor(buffer, tensor, value, offset, size);
}

bool copy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor* from, ggml_tensor* to) {
  return told(buffer, [&](BufferListener& listener) { listener.written(to, 0, ggml_nbytes(to)); })
      .cpy_tensor(buffer, from, to);
}

void clear(ggml_backend_buffer_t buffer, std::uint8_t value) {
  told(buffer, [&](BufferListener& listener) {
    listener.written_all(buffer);
  }).clear(buffer, value);
}

void free_buffer(ggml_backend_buffer_t buffer) {
  const ggml_backend_buffer_i original =
      told(buffer, [&](BufferListener& listener) { listener.freed(buffer); });
  {
    const std::lock_guard lock(table().mutex);
    table().buffers.erase(buffer);
  }
  buffer->iface = original;
  if (original.free_buffer != nullptr) original.free_buffer(buffer);
}

// What a buffer does not have it is not given, but for the end.
void put_before(ggml_backend_buffer_i& functions) {
  functions.free_buffer = free_buffer;
  if (functions.set_tensor != nullptr) functions.set_tensor = set_tensor;
  if (functions.set_tensor_2d != nullptr) functions.set_tensor_2d = set_tensor_2d;
  if (functions.memset_tensor != nullptr) functions.memset_tensor = memset_tensor;
  if (functions.cpy_tensor != nullptr) functions.cpy_tensor = copy_tensor;
  if (functions.clear != nullptr) functions.clear = clear;
}

}  // namespace

void watch(ggml_backend_buffer_t buffer, BufferListener& listener) {
  const std::lock_guard lock(table().mutex);
  const auto [place, is_new] = table().buffers.try_emplace(buffer);
  std::vector<BufferListener*>& listeners = place->second.listeners;
  if (is_new) {
    place->second.original = buffer->iface;
    put_before(buffer->iface);
  }
  if (std::find(listeners.begin(), listeners.end(), &listener) == listeners.end())
    listeners.push_back(&listener);
}

void unwatch(BufferListener& listener) {
  const std::lock_guard lock(table().mutex);
  for (auto place = table().buffers.begin(); place != table().buffers.end();) {
    std::erase(place->second.listeners, &listener);
    if (place->second.listeners.empty()) {
      place->first->iface = place->second.original;
      place = table().buffers.erase(place);
    } else {
      ++place;
    }
  }
}

}  // namespace verkv_ggml
