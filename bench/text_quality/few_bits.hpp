// A rival: the whole cache on the fast tier, every number in few bits, after KIVI (Liu et al.
// 2024).
//
// Numbers are rounded to the nearest of 2^bits levels between the least and the largest of their
// group, whose ends are stored as halves. A group is one channel of 128 tokens' keys, or 128
// coordinates of one token's value at most. The last tokens, which fill no group of 128, stay as
// they are, and so do tokens that are decoded later.
#ifndef VERKV_BENCH_TEXT_QUALITY_FEW_BITS_HPP
#define VERKV_BENCH_TEXT_QUALITY_FEW_BITS_HPP

#include <cstdint>
#include <span>

#include <verkv/types.hpp>

namespace verkv::lab {

inline constexpr std::int64_t kFewBitsTokens = 128;

// In place. keys: [token][channel]. bits: 1 to 8.
void round_keys(std::span<Half> keys, std::int64_t channels, int bits);

// In place. values: [token][KV head][dim].
void round_values(std::span<Half> values, std::int64_t kv_heads, std::int64_t dim, int bits);

// Bytes that such a cache takes of what halves take: of a head of `tokens` tokens, the first
// prompt_tokens of which were a prompt.
double few_bits_share(std::int64_t key_dim, std::int64_t value_dim, std::int64_t prompt_tokens,
                      std::int64_t tokens, int bits);

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_FEW_BITS_HPP
