// A block's share of the attention: rows of one split for the query heads of one part, and the
// merge of the splits.
#ifndef VERKV_CUDA_ATTENTION_SPLIT_CUH
#define VERKV_CUDA_ATTENTION_SPLIT_CUH

#include <cmath>
#include <cstdint>

#include <verkv/attention.hpp>
#include <verkv/clusters.hpp>

#include "device_math.cuh"
#include "masks.cuh"
#include "row_sums.cuh"
#include "step_workspace.hpp"
#include "terms.cuh"
#include "tuning.hpp"

namespace verkv::cuda {

__host__ __device__ constexpr int round_up(int n, int to) { return (n + to - 1) / to * to; }

// Dynamic shared memory of a block.
struct AttentionShared {
  int query_stride;  // floats
  int value_offset;  // bytes, of the value in a fetched row
  int row_stride;    // bytes; rows start in different banks
  int query_bytes;
  int number_bytes;
  int limb_bytes;
  int row_bytes;

  __host__ __device__ AttentionShared(const LayerView& layer, const StepGrid& grid)
      : query_stride(round_up(layer.key_dim, kLanes)) {
    const int element = static_cast<int>(size_bytes(layer.storage));
    const int tiles = round_up(grid.part_heads, kTileHeads) / kTileHeads;
    value_offset = round_up(layer.key_dim * element, 16);
    row_stride = round_up(value_offset + layer.value_dim * element, 128) + 16 * element;
    query_bytes = tiles * kTileHeads * query_stride * 4;
    number_bytes = tiles * kChunk * static_cast<int>(sizeof(float4));
    const bool has_limbs = with_element(
        layer.storage, [](auto zero) { return RowSums<decltype(zero), 1>::kHasLimbs; });
    limb_bytes = has_limbs ? tiles * kChunkProducts * static_cast<int>(sizeof(WeightLimbs)) : 0;
    // The sums of the row subsets meet there at the end.
    const int sum_bytes = kAttentionThreads * kTileHeads * static_cast<int>(sizeof(float4));
    row_bytes = grid.tile * row_stride < sum_bytes ? sum_bytes : grid.tile * row_stride;
  }
  __host__ __device__ int bytes() const {
    return query_bytes + number_bytes + limb_bytes + row_bytes;
  }
};

// What a block knows of its query heads.
struct HeadSums {
  float factor[kAttentionHeads];  // of what was added up before the last chunk
  // Of the plan where it is a number: logits are relative to it, or a logit of some thousands would
  // swallow the logarithm of a coefficient.
  float base[kAttentionHeads];
  float shift[kAttentionHeads];  // weights are relative to it; relative to base itself
  float sum[kAttentionHeads];    // of weights
  float beta[kAttentionHeads];
  float most[kAttentionHeads];      // first shift + log(cap * beta)
  double inverse[kAttentionHeads];  // of the sum over all splits
  std::uint32_t by_clusters;        // bits of the heads that estimate by clusters

  // States: of `heads` query heads. All threads call; a barrier must follow.
  VERKV_DEVICE void start(const HeadState* states, int heads, float cap) {
    const int h = threadIdx.x;
    static_assert(kAttentionHeads <= 32, "a warp knows all heads");
    if (h < 32) {
      const unsigned bits = __ballot_sync(kWholeWarp, h < heads && states[h].by_clusters != 0);
      if (h == 0) by_clusters = bits;
    }
    if (h < kAttentionHeads) {
      factor[h] = 1;
      base[h] = 0;
    }
    if (h >= heads) return;
    const HeadState& state = states[h];
    base[h] = fabsf(state.shift) <= kLargestFloat ? state.shift : 0.0f;
    shift[h] = state.shift - base[h];
    sum[h] = 0;
    beta[h] = state.beta;
    // In double, where the product neither overflows nor vanishes.
    const double product = static_cast<double>(cap) * static_cast<double>(state.beta);
    most[h] = cap < infinity() ? shift[h] + static_cast<float>(log(product)) : infinity();
  }
};

// 16 bytes to shared memory without a register that waits for them.
VERKV_DEVICE void copy_async(unsigned char* to, const unsigned char* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                   static_cast<unsigned>(__cvta_generic_to_shared(to))),
               "l"(__cvta_generic_to_global(from))
               : "memory");
}
VERKV_DEVICE void wait_for_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// `dim` elements, padded with zeros to a multiple of 16 bytes, by a warp.
template <class Element>
VERKV_DEVICE void copy_padded(const Element* from, int dim, unsigned char* to) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(Element));
#pragma unroll 1
  for (int j = lane_index(); j < round_up(dim, kPiece); j += 32)
    reinterpret_cast<Element*>(to)[j] = j < dim ? from[j] : Element{};
}

// A split's part of `all`.
struct Range {
  std::int64_t begin;
  std::int64_t count;

  VERKV_DEVICE Range(std::int64_t all, int splits, int split) {
    const std::int64_t each = (all + splits - 1) / splits;
    begin = min(all, split * each);
    count = min(all, (split + 1) * each) - begin;
  }
};

// The rows of one split for the query heads of one part.
template <class Element, int kColumns>
class AttentionSplit {
 public:
  VERKV_DEVICE AttentionSplit(const StepArguments& arguments, const HeadView& view, int heads,
                              std::int64_t query_head, const std::uint32_t* fetched,
                              unsigned char* memory, HeadSums& sums)
      : layer_(arguments.view.layer),
        ws_(arguments.workspace),
        view_(view),
        shared_(layer_, arguments.grid),
        sums_(sums),
        heads_(heads),
        tiles_((heads + kTileHeads - 1) / kTileHeads),
        units_(arguments.grid.units),
        query_head_(query_head),
        fetched_(fetched),
        query_(reinterpret_cast<float*>(memory)),
        rows_(memory + shared_.query_bytes + shared_.number_bytes + shared_.limb_bytes),
        row_sums_(tiles_, layer_.value_dim) {
    memory += shared_.query_bytes;
    weights_.number = reinterpret_cast<float4*>(memory);
    weights_.limb = reinterpret_cast<WeightLimbs*>(memory + shared_.number_bytes);
  }

  // Starts to copy fetched rows, a warp a row.
  VERKV_DEVICE void fetch(const std::uint32_t* positions, int count) {
    const int row_bytes = (layer_.key_dim + layer_.value_dim) * static_cast<int>(sizeof(Element));
    const bool wide = (layer_.key_dim * sizeof(Element) | row_bytes) % 16 == 0;
#pragma unroll 1
    for (int r = warp_index(); r < count; r += kAttentionWarps) {
      const auto* from = reinterpret_cast<const unsigned char*>(view_.host_rows) +
                         static_cast<std::int64_t>(positions[r]) * row_bytes;
      unsigned char* to = rows_ + r * shared_.row_stride;
      if (wide) {
#pragma unroll 1
        for (int i = 16 * lane_index(); i < row_bytes; i += 16 * 32) copy_async(to + i, from + i);
      } else {
        const Element* elements = reinterpret_cast<const Element*>(from);
        copy_padded(elements, layer_.key_dim, to);
        copy_padded(elements + layer_.key_dim, layer_.value_dim, to + shared_.value_offset);
      }
    }
  }

  // The queries times the attention scale, which only fetched rows need.
  VERKV_DEVICE void load_queries(const StepView& step, std::int64_t row, std::int64_t first_head) {
    const std::int64_t at = row * step.query_row_stride + first_head * step.query_head_stride;
    with_element(step.query_type, [&](auto zero) {
      load_queries(static_cast<const decltype(zero)*>(step.queries) + at, step.query_head_stride);
    });
  }

  // Of one value row.
  VERKV_DEVICE int value_bytes() const {
    return layer_.value_dim * static_cast<int>(sizeof(Element));
  }

  // Clusters whose centroids count something for a head of the part. After sums.start and a
  // barrier.
  VERKV_DEVICE std::int64_t clusters() const {
    return sums_.by_clusters != 0 ? clusters_of(view_.compressed) : 0;
  }

  // Logits of residents begin .. begin + count - 1 and the logarithms of their coefficients. Their
  // values are on the way meanwhile.
  VERKV_DEVICE void resident_logits(std::int64_t begin, int count) {
    const int r = threadIdx.x;
    if (r >= count) return;
    const std::int64_t i = begin + r;
    prefetch(view_.resident_values + i * value_bytes(), value_bytes());
    std::uint32_t place = 0;
    float rho = 0;
    bool drawn = i < view_.drawn;
    // Heads for which the certificate has left what the slot counts.
    const std::uint32_t known = drawn ? sums_.by_clusters : 0;
    drawn = drawn && known != (1u << heads_) - 1;
    if (drawn) {
      place = view_.resident_place[i];
      const Positive16 odds = view_.odds[place];
      drawn = odds.bits < kPositive16Infinity.bits && !in_mask(fetched_, place);
      rho = to_float(odds);
    }
    const float* logit = ws_.resident_logit + query_head_ * ws_.resident_stride + i;
    const float* sketched = ws_.weight + query_head_ * ws_.token_stride + place;
    float* out = reinterpret_cast<float*>(weights_.number + r);
    for (int t = 0; t < tiles_; ++t) {
#pragma unroll
      for (int k = 0; k < kTileHeads; ++k) {
        const int h = t * kTileHeads + k;
        if (h >= heads_) break;
        const bool is_known = (known >> h & 1u) != 0;
        float x = is_known ? *logit : *logit - sums_.base[h];
        if (drawn && !is_known && *sketched >= 0)
          x = drawn_logit(x, *sketched, rho, sums_.beta[h], sums_.most[h]);
        out[k] = x;
        logit += ws_.resident_stride;
        sketched += ws_.token_stride;
      }
      out += kTileHeads * kChunk;
    }
  }

  // What centroids begin .. begin + count - 1 count, as logits.
  VERKV_DEVICE void centroid_logits(std::int64_t begin, int count) {
    const int r = threadIdx.x;
    if (r >= count) return;
    prefetch(view_.centroids + (begin + r) * value_bytes(), value_bytes());
    const float* logit = ws_.centroid_logit + query_head_ * ws_.cluster_stride + begin + r;
    float* out = reinterpret_cast<float*>(weights_.number + r);
    for (int h = 0; h < heads_; ++h) {
      out[h / kTileHeads * kTileHeads * kChunk + h % kTileHeads] =
          (sums_.by_clusters >> h & 1u) != 0 ? *logit : minus_infinity();
      logit += ws_.cluster_stride;
    }
  }

  // Logits of at most `most` rows of the fast tier, residents and then centroids, of which `done`
  // have been added. Returns their values; out_count: how many.
  VERKV_DEVICE const std::byte* near_logits(const Range& residents, const Range& centroids,
                                            std::int64_t done, int most, int& out_count) {
    if (done < residents.count) {
      const std::int64_t from = residents.begin + done;
      out_count = static_cast<int>(min(std::int64_t{most}, residents.count - done));
      resident_logits(from, out_count);
      return view_.resident_values + from * value_bytes();
    }
    done -= residents.count;
    const std::int64_t from = centroids.begin + done;
    out_count = static_cast<int>(min(std::int64_t{most}, centroids.count - done));
    centroid_logits(from, out_count);
    return view_.centroids + from * value_bytes();
  }

  // Logits of the fetched rows in shared memory, in the order of sums of kernels.hpp: four threads
  // a row, half of the warps take every other pair of heads.
  VERKV_DEVICE void fetched_logits(int count) {
    constexpr int kRowWarps = kMostTile / 8;
    static_assert(kAttentionWarps == 2 * kRowWarps, "two sets of warps share the heads");
    if (warp_index() % kRowWarps * 8 >= count) return;
    const int r = warp_index() % kRowWarps * 8 + lane_index() / 4;
    const Element* key =
        reinterpret_cast<const Element*>(rows_ + (r < count ? r : 0) * shared_.row_stride);
    for (int h = warp_index() / kRowWarps * 2; h < heads_; h += 4) {
      const float* query = query_ + h * shared_.query_stride;
      float4 sum[2] = {make_float4(0, 0, 0, 0), make_float4(0, 0, 0, 0)};
#pragma unroll 4
      for (int j = 4 * (lane_index() % 4); j < layer_.key_dim; j += kLanes) {
        const float4 x = load_four(key + j);
        sum[0] = fma_four(x, *reinterpret_cast<const float4*>(query + j), sum[0]);
        sum[1] =
            fma_four(x, *reinterpret_cast<const float4*>(query + shared_.query_stride + j), sum[1]);
      }
      const float2 x =
          make_float2(soft_capped(fold16(sum[0]), layer_.soft_cap) - sums_.base[h],
                      soft_capped(fold16(sum[1]), layer_.soft_cap) - sums_.base[h + 1]);
      float4* out = weights_.number + h / kTileHeads * kChunk + r;
      if (r < count && lane_index() % 4 == 0)
        reinterpret_cast<float2*>(out)[h % kTileHeads / 2] = x;
    }
  }

  // Logits to weights, a warp a head. They stay relative to the plan's shift while the largest is
  // near it, so that sums seldom have to change.
  VERKV_DEVICE void weigh(int count) {
    const int rows = round_up(count, Sums::kRowStep);
    for (int h = warp_index(); h < tiles_ * kTileHeads; h += kAttentionWarps) {
      if (h >= heads_) {
        for (int r = lane_index(); r < rows; r += 32) Sums::put(Sums::place(weights_, h, r), 0);
        continue;
      }
      const float* logit =
          reinterpret_cast<const float*>(weights_.number + h / kTileHeads * kChunk) +
          h % kTileHeads;
      float top = minus_infinity();
      for (int r = lane_index(); r < count; r += 32) top = raise(top, logit[r * kTileHeads]);
      top = warp_top(top);
      const float before = sums_.shift[h];
      const float sum = sums_.sum[h];
      const bool moves = !(top <= before + kMostAbove) ||
                         (sum == 0 && top < before - kMostBelow && top > minus_infinity());
      const float shift = moves ? top : before;
      float all = 0;
      typename Sums::Place place = Sums::place(weights_, h, lane_index());
      for (int r = lane_index(); r < rows; r += 32) {
        const float p = r < count ? approximate_exp(logit[r * kTileHeads] - shift) : 0.0f;
        Sums::put(place, p);
        place += Sums::kPlaces;
        all += p;
      }
#pragma unroll
      for (int half = 16; half > 0; half /= 2) all += __shfl_xor_sync(kWholeWarp, all, half);
      __syncwarp();  // all lanes have read what changes
      if (lane_index() == 0) {
        const float factor = !moves ? 1.0f : sum == 0 ? 0.0f : weight_exp(before - shift);
        sums_.factor[h] = factor;
        sums_.shift[h] = shift;
        sums_.sum[h] = fmaf(sum, factor, all);
      }
    }
  }

  // Whether values of the fast tier can be added where they lie; otherwise they come to shared
  // memory too.
  VERKV_DEVICE bool aligned() const { return layer_.value_dim * sizeof(Element) % 16 == 0; }
  VERKV_DEVICE void copy_values(const std::byte* values, int count) {
    for (int r = warp_index(); r < count; r += kAttentionWarps) {
      copy_padded(reinterpret_cast<const Element*>(values + std::int64_t{r} * value_bytes()),
                  layer_.value_dim, rows_ + r * shared_.row_stride + shared_.value_offset);
    }
  }

  // Adds these values of the fast tier, or, where there are none, the rows in shared memory.
  VERKV_DEVICE void add(const std::byte* values, int count) {
    const Element* from = reinterpret_cast<const Element*>(values);
    int stride = layer_.value_dim;
    if (values == nullptr) {
      from = reinterpret_cast<const Element*>(rows_ + shared_.value_offset);
      stride = shared_.row_stride / static_cast<int>(sizeof(Element));
    }
    row_sums_.scale(sums_.factor);
    row_sums_.add(from, stride, count, weights_);
  }

  // Adds the subsets up and leaves the state of the split.
  VERKV_DEVICE void write_partial(int splits, int split) {
    float4* part = reinterpret_cast<float4*>(rows_);
    row_sums_.write(part);
    __syncthreads();
    for (int i = threadIdx.x; i < heads_ * units_; i += kAttentionThreads) {
      float4 sum = part[i];
      for (int s = 1; s < row_sums_.subsets(); ++s) {
        const float4 x = part[s * tiles_ * kTileHeads * units_ + i];
        sum = make_float4(sum.x + x.x, sum.y + x.y, sum.z + x.z, sum.w + x.w);
      }
      const std::int64_t at = (query_head_ + i / units_) * splits + split;
      reinterpret_cast<float4*>(ws_.partial_output)[at * units_ + i % units_] = sum;
    }
    if (static_cast<int>(threadIdx.x) < heads_) {
      const std::int64_t at = (query_head_ + threadIdx.x) * splits + split;
      ws_.partial_top[at] = sums_.shift[threadIdx.x];
      ws_.partial_sum[at] = sums_.sum[threadIdx.x];
    }
  }

  // Outputs and LSE of all splits.
  VERKV_DEVICE void merge(const StepView& step, int splits) {
    for (int h = warp_index(); h < heads_; h += kAttentionWarps) merge_sums(step, splits, h);
    __syncthreads();
    for (int i = threadIdx.x; i < heads_ * units_; i += kAttentionThreads) {
      const int h = i / units_;
      const int unit = i % units_;
      const float* factor = split_factors(splits, h);
      const float4* from = reinterpret_cast<const float4*>(ws_.partial_output) +
                           (query_head_ + h) * splits * units_ + unit;
      float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 8
      for (int s = 0; s < splits; ++s) {
        const float x = factor[s];
        sum = fma_four(make_float4(x, x, x, x), from[s * units_], sum);
      }
      const float all[4] = {sum.x, sum.y, sum.z, sum.w};
      float* out = step.output + (query_head_ + h) * layer_.value_dim + 4 * unit;
#pragma unroll
      for (int d = 0; d < 4; ++d) {
        if (4 * unit + d < layer_.value_dim)
          out[d] = static_cast<float>(static_cast<double>(all[d]) * sums_.inverse[h]);
      }
    }
  }

 private:
  using Sums = RowSums<Element, kColumns>;

  // A warp a head.
  template <class Number>
  VERKV_DEVICE void load_queries(const Number* from, std::int64_t head_stride) {
#pragma unroll 1
    for (int h = warp_index(); h < tiles_ * kTileHeads; h += kAttentionWarps) {
#pragma unroll 4
      for (int j = lane_index(); j < shared_.query_stride; j += 32) {
        const bool there = h < heads_ && j < layer_.key_dim;
        query_[h * shared_.query_stride + j] =
            there ? layer_.scale * as_float(from[h * head_stride + j]) : 0.0f;
      }
    }
  }

  // What the sums of each split count in the end; where the weights were.
  VERKV_DEVICE float* split_factors(int splits, int h) const {
    static_assert(kMostSplits <= kChunk);
    return reinterpret_cast<float*>(weights_.number) + h * splits;
  }

  // The common shift, the factors and the denominator of a head, by a warp.
  VERKV_DEVICE void merge_sums(const StepView& step, int splits, int h) {
    const std::int64_t at = (query_head_ + h) * splits;
    float* factor = split_factors(splits, h);
    float top = minus_infinity();
    for (int s = lane_index(); s < splits; s += 32) {
      if (ws_.partial_sum[at + s] != 0) top = raise(top, ws_.partial_top[at + s]);
    }
    top = warp_top(top);
    float sink = minus_infinity();
    if (layer_.sink_logits != nullptr) {
      sink = layer_.sink_logits[(query_head_ + h) % layer_.query_heads()] - sums_.base[h];
      top = raise(top, sink);
    }
    double sum = 0;
    for (int s = lane_index(); s < splits; s += 32) {
      const float own = ws_.partial_sum[at + s];
      factor[s] = own == 0 ? 0.0f : weight_exp(ws_.partial_top[at + s] - top);
      sum += static_cast<double>(own) * static_cast<double>(factor[s]);
    }
#pragma unroll
    for (int half = 16; half > 0; half /= 2) sum += __shfl_xor_sync(kWholeWarp, sum, half);
    if (layer_.sink_logits != nullptr) sum += static_cast<double>(weight_exp(sink - top));
    if (lane_index() != 0) return;
    sums_.inverse[h] = sum == 0 ? 0 : 1 / sum;
    if (step.lse != nullptr) {
      step.lse[query_head_ + h] = sum == 0
                                      ? minus_infinity()
                                      : static_cast<float>(static_cast<double>(sums_.base[h]) +
                                                           static_cast<double>(top) + log(sum));
    }
  }

  const LayerView& layer_;
  const StepWorkspace& ws_;
  const HeadView& view_;
  AttentionShared shared_;
  HeadSums& sums_;
  int heads_;
  int tiles_;
  int units_;
  std::int64_t query_head_;
  const std::uint32_t* fetched_;
  float* query_;         // [head, padded to tiles][query_stride]
  unsigned char* rows_;  // [row][row_stride]
  WeightArrays weights_;
  Sums row_sums_;
};

}  // namespace verkv::cuda

#endif  // VERKV_CUDA_ATTENTION_SPLIT_CUH
