// Copies of models with unrounded activations.
#ifndef VERKV_BENCH_TEXT_QUALITY_UNPACK_HPP
#define VERKV_BENCH_TEXT_QUALITY_UNPACK_HPP

#include <string>

namespace verkv::lab {

// Writes a copy of the model with all weights as 32-bit floats: the same numbers, but multiplied
// with activations that are not rounded to 8 bits, which else moves logits about as much as a good
// cache does. threads 0: one per hardware thread. Throws EngineError.
void unpack_model(const std::string& from, const std::string& to, int threads);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_UNPACK_HPP
