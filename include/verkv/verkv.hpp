// Everything that an engine on the CPU or a study includes: the cache, recorded caches, and the
// formulas of the method stage by stage. <verkv/cuda_cache.hpp> comes with the target verkv::cuda.
#ifndef VERKV_VERKV_HPP
#define VERKV_VERKV_HPP

#include <verkv/attention.hpp>
#include <verkv/certificate.hpp>
#include <verkv/config.hpp>
#include <verkv/error.hpp>
#include <verkv/fetch_plan.hpp>
#include <verkv/importance.hpp>
#include <verkv/inclusion.hpp>
#include <verkv/kv_cache_manager.hpp>
#include <verkv/metrics.hpp>
#include <verkv/philox.hpp>
#include <verkv/recorded_cache.hpp>
#include <verkv/reports.hpp>
#include <verkv/row_attention.hpp>
#include <verkv/sample.hpp>
#include <verkv/settings.hpp>
#include <verkv/shrinkage.hpp>
#include <verkv/sketch.hpp>
#include <verkv/sketch_error.hpp>
#include <verkv/types.hpp>
#include <verkv/view.hpp>

#endif  // VERKV_VERKV_HPP
