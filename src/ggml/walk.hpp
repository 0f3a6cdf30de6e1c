// Goes through the nodes that ggml's scheduler hands us: answers attention, passes on the rest.
#ifndef VERKV_SRC_GGML_WALK_HPP
#define VERKV_SRC_GGML_WALK_HPP

#include <ggml.h>

#include <map>
#include <memory>
#include <vector>

#include "compressed.hpp"
#include "dense.hpp"
#include "log.hpp"
#include "masks.hpp"
#include "report.hpp"
#include "settings.hpp"
#include "stock.hpp"

namespace verkv_ggml {

class Walk {
 public:
  explicit Walk(const Settings& settings) : settings_(settings), dense_(stock_) {}
  // Tells what came of it.
  ~Walk();
  Walk(const Walk&) = delete;
  Walk& operator=(const Walk&) = delete;

  Stock& stock() { return stock_; }
  ggml_status compute(ggml_cgraph* graph);

 private:
  Compressed* compressed_of(const CacheTensor& tensor);
  bool answer(const ggml_tensor* node);
  void answer_rows(const Attention& attention, const Visible& visible);
  ggml_status pass_on();

  const Settings& settings_;
  Stock stock_;
  Dense dense_;
  Masks masks_;
  // Nodes that wait to be passed on.
  std::vector<ggml_tensor*> waiting_;
  bool waiting_light_ = true;
  Report report_;
  Once once_;
  // By buffer, which is what one cache of the engine lies in.
  std::map<ggml_backend_buffer_t, std::unique_ptr<Compressed>> caches_;
};

}  // namespace verkv_ggml

#endif  // VERKV_SRC_GGML_WALK_HPP
