// Times on the device: events, and the median and quartiles of repetitions.
#ifndef VERKV_BENCH_CUDA_TIMING_HPP
#define VERKV_BENCH_CUDA_TIMING_HPP

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda_error.hpp"
#include "device_memory.hpp"

namespace verkv::bench {

class Event {
 public:
  Event() { VERKV_CUDA_CHECK(cudaEventCreate(&event_)); }
  ~Event() { cudaEventDestroy(event_); }
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;
  void record(cudaStream_t stream) { VERKV_CUDA_CHECK(cudaEventRecord(event_, stream)); }
  // Waits for the last record.
  void wait() { VERKV_CUDA_CHECK(cudaEventSynchronize(event_)); }
  operator cudaEvent_t() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

// Between two events that have been waited for.
inline double seconds_between(const Event& from, const Event& to) {
  float milliseconds = 0;
  VERKV_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, from, to));
  return 1e-3 * static_cast<double>(milliseconds);
}

class Stream {
 public:
  Stream() { VERKV_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking)); }
  ~Stream() { cudaStreamDestroy(stream_); }
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  void wait() const { VERKV_CUDA_CHECK(cudaStreamSynchronize(stream_)); }
  operator cudaStream_t() const { return stream_; }

 private:
  cudaStream_t stream_ = nullptr;
};

// What `work` enqueues, as a graph.
class Graph {
 public:
  template <class Work>
  Graph(cudaStream_t stream, Work&& work) {
    VERKV_CUDA_CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    work();
    cudaGraph_t graph = nullptr;
    VERKV_CUDA_CHECK(cudaStreamEndCapture(stream, &graph));
    const cudaError_t made = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    VERKV_CUDA_CHECK(made);
  }
  ~Graph() { cudaGraphExecDestroy(exec_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void launch(cudaStream_t stream) const { VERKV_CUDA_CHECK(cudaGraphLaunch(exec_, stream)); }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Seconds: the median and the quartiles of the repetitions.
struct Timing {
  double median = 0;
  double lower = 0;
  double upper = 0;
  std::int64_t repetitions = 0;
};

// values: not empty.
inline Timing timing_of(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto quantile = [&](double p) {
    const double place = p * static_cast<double>(values.size() - 1);
    const std::size_t below = static_cast<std::size_t>(place);
    const std::size_t above = std::min(below + 1, values.size() - 1);
    return std::lerp(values[below], values[above], place - std::floor(place));
  };
  return {quantile(0.5), quantile(0.25), quantile(0.75), static_cast<std::int64_t>(values.size())};
}

// Writes over a buffer that is larger than the second-level cache, so that nothing of what is timed
// next lies there. It also gives the host time to enqueue that.
class Flush {
 public:
  explicit Flush(std::int64_t bytes) : buffer_(bytes, "flushing the cache") {}
  std::int64_t bytes() const { return buffer_.bytes(); }
  void enqueue(cudaStream_t stream) {
    VERKV_CUDA_CHECK(cudaMemsetAsync(buffer_.data(), ++value_ % 256,
                                     static_cast<std::size_t>(buffer_.bytes()), stream));
  }

 private:
  cuda::DeviceBuffer<std::byte> buffer_;
  int value_ = 0;
};

// Runs `work` warm_up + repetitions times and times the latter. `before` enqueues what comes before
// each and is not timed; if it takes the device longer than the host needs to enqueue the work, the
// host's calls are not in the times.
template <class Before, class Work>
Timing measure(cudaStream_t stream, int warm_up, int repetitions, Before&& before, Work&& work) {
  Event begin;
  Event end;
  std::vector<double> seconds;
  for (int i = -warm_up; i < repetitions; ++i) {
    before();
    begin.record(stream);
    work();
    end.record(stream);
    end.wait();
    if (i >= 0) seconds.push_back(seconds_between(begin, end));
  }
  return timing_of(std::move(seconds));
}

}  // namespace verkv::bench

#endif  // VERKV_BENCH_CUDA_TIMING_HPP
