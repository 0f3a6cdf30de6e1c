#include "support/blocks.hpp"

#include <cmath>

namespace verkv::test {

Block constant_block(std::int64_t tokens, std::int64_t heads, std::int64_t dim, float value) {
  return {tokens, heads, dim, std::vector<float>(size(tokens * heads * dim), value)};
}

Block random_block(Random& random, std::int64_t tokens, std::int64_t heads, std::int64_t dim,
                   double spread, double centre) {
  Block block = constant_block(tokens, heads, dim, 0);
  std::vector<double> middle;
  for (std::int64_t i = 0; i < heads * dim; ++i) middle.push_back(centre * random.normal());
  for (std::size_t i = 0; i < block.data.size(); ++i) {
    block.data[i] = static_cast<float>(middle[i % middle.size()] + spread * random.normal());
  }
  return block;
}

Scores random_scores(Random& random, std::int64_t heads, std::int64_t tokens, ScoreKind kind) {
  Scores scores{heads, tokens, {}};
  for (std::int64_t i = 0; i < heads * tokens; ++i) {
    double x = std::exp(2 * random.normal());
    if (kind == ScoreKind::zero) x = 0;
    if (kind == ScoreKind::equal) x = 0.25;
    if (kind == ScoreKind::with_zeros && random.below(3) == 0) x = 0;
    scores.data.push_back(static_cast<float>(x));
  }
  return scores;
}

void compress(KvCacheManager& cache, SequenceId sequence, const std::vector<Scores>& scores,
              const std::vector<Block>& prompt_queries) {
  std::vector<ImportanceView> views;
  for (const Scores& s : scores) views.push_back(s.view());
  std::vector<TensorView> queries;
  for (const Block& block : prompt_queries) queries.push_back(block.view());
  cache.compress(sequence, views, queries);
}

}  // namespace verkv::test
