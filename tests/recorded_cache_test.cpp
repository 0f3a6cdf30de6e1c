// The reader of recorded caches: the shipped file, every way a file can be wrong, and random
// damage.
#include <verkv/recorded_cache.hpp>

#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "catch.hpp"
#include "support/safetensors_writer.hpp"

namespace {

using verkv::DType;
using verkv::FormatError;
using verkv::RecordedCache;
using verkv::RecordedLayer;
using verkv::test::make_tensor;
using verkv::test::SafeTensor;
using verkv::test::SafeTensorsFile;
using verkv::test::TemporaryFile;
using Json = nlohmann::json;

std::string example_path() {
#if defined(VERKV_EXAMPLE_CACHE)
  return VERKV_EXAMPLE_CACHE;
#elif defined(VERKV_TEST_DATA_DIR)
  return VERKV_TEST_DATA_DIR "/essays-4k-small.safetensors";
#else
  const std::string here = __FILE__;
  return here.substr(0, here.find_last_of('/') + 1) +
         "../examples/data/essays-4k-small.safetensors";
#endif
}

constexpr std::int64_t kKvHeads = 2;
constexpr std::int64_t kQueryHeads = 4;
constexpr std::int64_t kTokens = 5;
constexpr std::int64_t kSteps = 3;
constexpr std::int64_t kKeyDim = 4;
constexpr std::int64_t kValueDim = 6;

// Distinct, exactly representable values: the flat index in eighths.
std::vector<float> ramp(const std::vector<std::int64_t>& shape, float first = 0) {
  std::int64_t count = 1;
  for (const std::int64_t extent : shape) count *= extent;
  std::vector<float> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = first + static_cast<float>(i) / 8;
  return values;
}

SafeTensor ramp_tensor(DType type, const std::vector<std::int64_t>& shape, float first = 0) {
  return make_tensor(type, shape, ramp(shape, first));
}

// A small good file: layers 3 and 7, all three types.
SafeTensorsFile good_file() {
  SafeTensorsFile file;
  for (const std::int64_t layer : {3, 7}) {
    const std::string prefix = "layers." + std::to_string(layer) + ".";
    file.tensors[prefix + "key"] =
        ramp_tensor(DType::f16, {kKvHeads, kTokens, kKeyDim}, static_cast<float>(layer));
    file.tensors[prefix + "value"] = ramp_tensor(DType::bf16, {kKvHeads, kTokens, kValueDim});
    file.tensors[prefix + "query"] = ramp_tensor(DType::f32, {kSteps, kQueryHeads, kKeyDim});
    file.tensors[prefix + "new_key"] = ramp_tensor(DType::f16, {kSteps, kKvHeads, kKeyDim});
    file.tensors[prefix + "new_value"] = ramp_tensor(DType::f16, {kSteps, kKvHeads, kValueDim});
    file.tensors[prefix + "importance.first"] = ramp_tensor(DType::f32, {kKvHeads, kTokens});
    file.tensors[prefix + "importance.second"] = ramp_tensor(DType::f16, {kKvHeads, kTokens});
  }
  file.tensors["layers.3.prompt_query"] = ramp_tensor(DType::f16, {2, kQueryHeads, kKeyDim});
  file.metadata = {{"model", "synthetic"}, {"prompt_tokens", "5"}, {"scale", "0.5"}};
  return file;
}

float element(const verkv::TensorView& view, std::int64_t token, std::int64_t head,
              std::int64_t i) {
  const void* row = view.row(token, head);
  switch (view.type) {
    case DType::f32:
      return static_cast<const float*>(row)[i];
    case DType::f16:
      return verkv::to_float(static_cast<const verkv::Half*>(row)[i]);
    case DType::bf16:
      return verkv::to_float(static_cast<const verkv::BFloat16*>(row)[i]);
  }
  return 0;
}

// The message of the FormatError that loading `bytes` ends in; empty if it loads.
std::string complaint(const TemporaryFile& file, const std::string& bytes) {
  file.write(bytes);
  try {
    RecordedCache::load(file.path());
  } catch (const FormatError& error) {
    CHECK(error.code() == verkv::ErrorCode::format);
    return error.what();
  }
  return {};
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST_CASE("the shipped recording loads", "[recorded_cache]") {
  const RecordedCache cache = RecordedCache::load(example_path());
  CHECK(cache.prompt_tokens() == 4090);
  CHECK(cache.steps() == 64);
  CHECK(cache.scale() == 0.125);
  CHECK_FALSE(cache.soft_cap());
  CHECK_FALSE(cache.window());
  CHECK(contains(cache.metadata().at("model"), "SmolLM2"));
  REQUIRE(cache.layers().size() == 2);
  CHECK(cache.layers()[0].index == 0);
  CHECK(cache.layers()[1].index == 21);
  for (const RecordedLayer& layer : cache.layers()) {
    CHECK(layer.kv_heads == 3);
    CHECK(layer.query_heads == 9);
    CHECK(layer.key_dim == 64);
    CHECK(layer.value_dim == 64);
    CHECK(layer.key.type == DType::f16);
    CHECK(layer.query.type == DType::f32);
    CHECK(layer.prompt_query.tokens == 64);
    for (const char* name : {"kvzip", "kvzip_mean", "kvzip_rms", "h2o", "snapkv"}) {
      CHECK(layer.importance.count(name) == 1);
    }
  }
}

TEST_CASE("tensors are viewed as the file has them", "[recorded_cache]") {
  const TemporaryFile file("verkv-recorded", good_file().bytes());
  RecordedCache loaded = RecordedCache::load(file.path());
  const RecordedCache cache = std::move(loaded);  // views survive a move
  CHECK(cache.prompt_tokens() == kTokens);
  CHECK(cache.steps() == kSteps);
  CHECK(cache.scale() == 0.5);
  CHECK(cache.metadata().at("model") == "synthetic");
  REQUIRE(cache.layers().size() == 2);
  const RecordedLayer& layer = cache.layers()[0];
  CHECK(layer.index == 3);
  CHECK(layer.kv_heads == kKvHeads);
  CHECK(layer.query_heads == kQueryHeads);
  CHECK(layer.key_dim == kKeyDim);
  CHECK(layer.value_dim == kValueDim);
  CHECK(layer.prompt_query.tokens == 2);
  CHECK(cache.layers()[1].prompt_query.data == nullptr);

  for (std::int64_t head = 0; head < kKvHeads; ++head) {
    for (std::int64_t token = 0; token < kTokens; ++token) {
      for (std::int64_t i = 0; i < kKeyDim; ++i) {
        const float expected = 3 + static_cast<float>((head * kTokens + token) * kKeyDim + i) / 8;
        CHECK(element(layer.key, token, head, i) == expected);
      }
      const float score = static_cast<float>(head * kTokens + token) / 8;
      for (const char* name : {"first", "second"}) {
        const verkv::ImportanceView view = layer.importance.at(name);
        CHECK(view.heads == kKvHeads);
        CHECK(view.tokens == kTokens);
        CHECK(view.data[head * view.head_stride + token] == score);
      }
    }
  }
  CHECK(element(layer.query, 2, 3, 1) ==
        static_cast<float>((2 * kQueryHeads + 3) * kKeyDim + 1) / 8);
  CHECK(element(layer.new_value, 1, 1, 5) ==
        static_cast<float>((1 * kKvHeads + 1) * kValueDim + 5) / 8);
  for (const verkv::TensorView* view :
       {&layer.key, &layer.value, &layer.query, &layer.new_key, &layer.new_value}) {
    CHECK(reinterpret_cast<std::uintptr_t>(view->data) % 16 == 0);
  }
}

TEST_CASE("alignment in the file does not matter", "[recorded_cache]") {
  // A one-byte tensor in front, a hole behind, tensors of other types between: all odd, all legal.
  SafeTensorsFile source = good_file();
  source.tensors["a"] = {"U8", {1}, "x"};
  source.tensors["layers.3.tokens"] = {"I64", {2}, std::string(16, '\1')};
  source.tensors["layers.x.key"] = {"I32", {1}, std::string(4, '\1')};
  source.tensors["strange"] = {"F6_E3M2", {3}, "abc"};
  source.tensors["empty"] = {"F32", {0, 7}, ""};
  const TemporaryFile file("verkv-recorded", SafeTensorsFile::join(source.header().dump() + "   ",
                                                                   source.data() + "hole"));
  const RecordedCache cache = RecordedCache::load(file.path());
  CHECK(reinterpret_cast<std::uintptr_t>(cache.layers()[0].query.data) % 16 == 0);
  CHECK(element(cache.layers()[0].key, 0, 0, 1) == 3.125f);
}

TEST_CASE("metadata defaults", "[recorded_cache]") {
  SafeTensorsFile source = good_file();
  source.metadata.clear();
  const TemporaryFile file("verkv-recorded", source.bytes());
  const RecordedCache cache = RecordedCache::load(file.path());
  CHECK(cache.scale() == 0.5);  // 1 / sqrt(4)
  CHECK_FALSE(cache.soft_cap());
  CHECK_FALSE(cache.window());

  source.metadata = {{"soft_cap", "50.0"}, {"window", "4096"}, {"scale", "6.25e-2"}};
  file.write(source.bytes());
  const RecordedCache other = RecordedCache::load(file.path());
  CHECK(other.soft_cap() == 50);
  CHECK(other.window() == 4096);
  CHECK(other.scale() == 0.0625);
}

TEST_CASE("a bad file is refused with tensor, value and limit", "[recorded_cache]") {
  const TemporaryFile file("verkv-recorded");
  const SafeTensorsFile good = good_file();
  REQUIRE(complaint(file, good.bytes()).empty());

  // What is spoilt, and what the message must say.
  struct Case {
    std::string what;
    std::function<void(SafeTensorsFile&, Json&)> spoil;  // tensors and header
    std::vector<std::string> says;
  };
  const auto replace = [](std::string name, SafeTensor tensor) {
    return [name, tensor](SafeTensorsFile& f, Json& header) {
      f.tensors[name] = tensor;
      header = f.header();
    };
  };
  const auto in_header = [](std::string name, std::string member, Json value) {
    return [=](SafeTensorsFile&, Json& header) { header[name][member] = value; };
  };
  const auto metadata = [](std::string key, Json value) {
    return [=](SafeTensorsFile&, Json& header) { header["__metadata__"][key] = value; };
  };
  const auto number = [](const std::string& text) { return Json::parse(text); };
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  const auto spoilt = [](DType type, std::vector<std::int64_t> shape, std::size_t index,
                         float value) {
    std::vector<float> values = ramp(shape);
    values[index] = value;
    return make_tensor(type, shape, values);
  };

  std::vector<Case> cases{
      {"extra dimension",
       in_header("layers.3.key", "shape", {kKvHeads, kTokens, kKeyDim, 1}),
       {"layers.3.key", "4 dimensions", "expected 3"}},
      {"wrong type",
       replace("layers.3.key", {"I16", {kKvHeads, kTokens, kKeyDim}, std::string(80, '\1')}),
       {"layers.3.key", "I16", "F32, F16, BF16"}},
      {"unknown type",
       replace("layers.3.key", {"Q4", {kKvHeads, kTokens, kKeyDim}, std::string(20, '\1')}),
       {"layers.3.key", "Q4"}},
      {"type of importance",
       replace("layers.3.importance.first", {"F64", {kKvHeads, kTokens}, std::string(80, '\0')}),
       {"layers.3.importance.first", "F64"}},
      {"size is not that of the shape",
       in_header("layers.3.key", "shape", {kKvHeads, kTokens, kKeyDim + 1}),
       {"layers.3.key", "100 bytes", "span 80"}},
      {"size overflows",
       in_header("layers.3.key", "shape", {1LL << 40, 1LL << 40, 4}),
       {"layers.3.key", "overflows"}},
      {"size overflows beside 0",
       in_header("layers.3.key", "shape", {1LL << 40, 1LL << 40, 0}),
       {"layers.3.key", "overflows"}},
      {"empty tensor",
       replace("layers.3.key", {"F16", {kKvHeads, 0, kKeyDim}, ""}),
       {"layers.3.key", "[2, 0, 4]"}},
      {"begin behind end",
       in_header("layers.3.key", "data_offsets", {100, 20}),
       {"layers.3.key", "100", "20"}},
      {"end behind the data",
       in_header("layers.3.key", "data_offsets", {1000000, 1000080}),
       {"layers.3.key", "1000080"}},
      {"three offsets",
       in_header("layers.3.key", "data_offsets", {0, 80, 90}),
       {"layers.3.key", "data_offsets"}},
      {"offsets no array",
       in_header("layers.3.key", "data_offsets", 80),
       {"layers.3.key", "data_offsets"}},
      {"negative offset",
       in_header("layers.3.key", "data_offsets", {-80, 0}),
       {"layers.3.key", "data_offsets"}},
      {"fractional offset",
       in_header("layers.3.key", "data_offsets", {0.5, 80}),
       {"layers.3.key", "data_offsets"}},
      {"offset as a string",
       in_header("layers.3.key", "data_offsets", {"0", 80}),
       {"layers.3.key", "data_offsets"}},
      {"offset beyond 63 bits",
       in_header("layers.3.key", "data_offsets", {0, number("18446744073709551615")}),
       {"layers.3.key", "18446744073709551615"}},
      {"offset beyond 64 bits",
       in_header("layers.3.key", "data_offsets", {0, number("36893488147419103232")}),
       {"layers.3.key", "data_offsets"}},
      {"negative shape",
       in_header("layers.3.key", "shape", {-2, -5, 8}),
       {"layers.3.key", "shape"}},
      {"shape no array", in_header("layers.3.key", "shape", "2,5,4"), {"layers.3.key", "shape"}},
      {"type no string", in_header("layers.3.key", "dtype", 16), {"layers.3.key", "dtype"}},
      {"tensor no object",
       [](SafeTensorsFile&, Json& h) { h["layers.3.key"] = 7; },
       {"layers.3.key", "dtype"}},
      {"member missing",
       [](SafeTensorsFile&, Json& h) { h["layers.3.key"].erase("shape"); },
       {"layers.3.key", "shape"}},
      {"metadata no object",
       [](SafeTensorsFile&, Json& h) { h["__metadata__"] = "x"; },
       {"__metadata__"}},
      {"metadata no string", metadata("scale", 0.5), {"metadata", "scale", "not a string"}},
      {"scale no number", metadata("scale", "0.5x"), {"scale", "0.5x"}},
      {"scale empty", metadata("scale", ""), {"scale"}},
      {"scale 0", metadata("scale", "0"), {"scale", "above 0"}},
      {"scale infinite", metadata("scale", "inf"), {"scale", "inf"}},
      {"soft cap negative", metadata("soft_cap", "-1"), {"soft_cap", "-1"}},
      {"window fractional", metadata("window", "1.5"), {"window", "1.5"}},
      {"prompt_tokens no number", metadata("prompt_tokens", "five"), {"prompt_tokens", "five"}},
      {"prompt_tokens beyond 64 bits",
       metadata("prompt_tokens", "99999999999999999999"),
       {"prompt_tokens"}},
      {"prompt_tokens differ", metadata("prompt_tokens", "6"), {"prompt_tokens", "6", "5"}},
      {"tokens of value differ",
       replace("layers.3.value", ramp_tensor(DType::f16, {kKvHeads, kTokens + 1, kValueDim})),
       {"layers.3.value", "[2, 6, 6]", "[2, 5, 6]"}},
      {"query heads no multiple",
       replace("layers.3.query", ramp_tensor(DType::f32, {kSteps, 3, kKeyDim})),
       {"layers.3.query", "3 query heads", "2 KV heads"}},
      {"query dim differs",
       replace("layers.3.query", ramp_tensor(DType::f32, {kSteps, kQueryHeads, kKeyDim + 1})),
       {"layers.3.query", "[3, 4, 5]"}},
      {"new_key steps differ",
       replace("layers.3.new_key", ramp_tensor(DType::f16, {kSteps + 1, kKvHeads, kKeyDim})),
       {"layers.3.new_key", "[4, 2, 4]"}},
      {"new_value heads differ",
       replace("layers.3.new_value", ramp_tensor(DType::f16, {kSteps, kKvHeads + 1, kValueDim})),
       {"layers.3.new_value", "[3, 3, 6]"}},
      {"prompt_query dim differs",
       replace("layers.3.prompt_query", ramp_tensor(DType::f16, {2, kQueryHeads, kKeyDim + 2})),
       {"layers.3.prompt_query"}},
      {"importance tokens differ",
       replace("layers.3.importance.first", ramp_tensor(DType::f32, {kKvHeads, kTokens - 1})),
       {"layers.3.importance.first", "[2, 4]", "[2, 5]"}},
      {"NaN key",
       replace("layers.3.key", spoilt(DType::f16, {kKvHeads, kTokens, kKeyDim}, 26, nan)),
       {"layers.3.key", "[1, 1, 2]", "nan"}},
      {"infinite value",
       replace("layers.7.value", spoilt(DType::bf16, {kKvHeads, kTokens, kValueDim}, 59, infinity)),
       {"layers.7.value", "[1, 4, 5]", "inf"}},
      {"NaN query",
       replace("layers.7.query", spoilt(DType::f32, {kSteps, kQueryHeads, kKeyDim}, 0, nan)),
       {"layers.7.query", "[0, 0, 0]", "nan"}},
      {"NaN new_key",
       replace("layers.7.new_key", spoilt(DType::f16, {kSteps, kKvHeads, kKeyDim}, 1, nan)),
       {"layers.7.new_key", "[0, 0, 1]"}},
      {"NaN prompt_query",
       replace("layers.3.prompt_query", spoilt(DType::f16, {2, kQueryHeads, kKeyDim}, 1, nan)),
       {"layers.3.prompt_query"}},
      {"NaN importance",
       replace("layers.3.importance.first", spoilt(DType::f32, {kKvHeads, kTokens}, 7, nan)),
       {"layers.3.importance.first", "[1, 2]", "nan"}},
      {"negative importance",
       replace("layers.3.importance.second", spoilt(DType::f16, {kKvHeads, kTokens}, 7, -0.25f)),
       {"layers.3.importance.second", "[1, 2]", "-0.25", "below 0"}},
      {"infinite importance",
       replace("layers.3.importance.first", spoilt(DType::f32, {kKvHeads, kTokens}, 0, infinity)),
       {"layers.3.importance.first", "inf"}},
  };
  for (const char* part : {"key", "value", "query", "new_key", "new_value"}) {
    const std::string name = std::string("layers.7.") + part;
    cases.push_back({"missing " + name,
                     [name](SafeTensorsFile&, Json& h) { h.erase(name); },
                     {name, "missing"}});
  }
  cases.push_back({"no layer",
                   [](SafeTensorsFile& f, Json& h) {
                     f.tensors = {{"weights", f.tensors.at("layers.3.key")}};
                     h = f.header();
                   },
                   {"no recorded layer"}});
  cases.push_back(
      {"layers of different length",
       [](SafeTensorsFile& f, Json& h) {
         f.metadata.clear();
         f.tensors["layers.7.key"] = ramp_tensor(DType::f16, {kKvHeads, 4, kKeyDim});
         f.tensors["layers.7.value"] = ramp_tensor(DType::f16, {kKvHeads, 4, kValueDim});
         f.tensors["layers.7.importance.first"] = ramp_tensor(DType::f16, {kKvHeads, 4});
         f.tensors["layers.7.importance.second"] = ramp_tensor(DType::f16, {kKvHeads, 4});
         h = f.header();
       },
       {"layers.7.key", "4 tokens", "5"}});
  cases.push_back(
      {"layers of different steps",
       [](SafeTensorsFile& f, Json& h) {
         f.tensors["layers.7.query"] = ramp_tensor(DType::f32, {2, kQueryHeads, kKeyDim});
         f.tensors["layers.7.new_key"] = ramp_tensor(DType::f16, {2, kKvHeads, kKeyDim});
         f.tensors["layers.7.new_value"] = ramp_tensor(DType::f16, {2, kKvHeads, kValueDim});
         h = f.header();
       },
       {"layers.7.query", "2 steps", "3"}});
  cases.push_back(
      {"scale missing and head sizes differ",
       [](SafeTensorsFile& f, Json& h) {
         f.metadata.clear();
         f.tensors["layers.7.key"] = ramp_tensor(DType::f16, {kKvHeads, kTokens, 8});
         f.tensors["layers.7.query"] = ramp_tensor(DType::f32, {kSteps, kQueryHeads, 8});
         f.tensors["layers.7.new_key"] = ramp_tensor(DType::f16, {kSteps, kKvHeads, 8});
         h = f.header();
       },
       {"scale", "8"}});
  cases.push_back({"overlap",
                   [](SafeTensorsFile&, Json& h) {
                     const std::int64_t begin = h["layers.7.key"]["data_offsets"][0];
                     h["layers.3.key"]["data_offsets"] = {begin + 2, begin + 82};
                   },
                   {"layers.3.key", "inside", "layers.7.key"}});
  cases.push_back({"overlap with a tensor that is not ours",
                   [](SafeTensorsFile&, Json& h) {
                     h["other"] = {{"dtype", "U8"}, {"shape", {1}}, {"data_offsets", {3, 4}}};
                   },
                   {"inside"}});

  for (const Case& c : cases) {
    INFO(c.what);
    SafeTensorsFile bad = good;
    Json header = bad.header();
    c.spoil(bad, header);
    const std::string message = complaint(file, SafeTensorsFile::join(header.dump(), bad.data()));
    INFO(message);
    CHECK(contains(message, file.path()));
    for (const std::string& part : c.says) CHECK(contains(message, part));
    CHECK(!contains(message, "\n"));
  }
}

TEST_CASE("a bad header is refused", "[recorded_cache]") {
  const TemporaryFile file("verkv-recorded");
  const SafeTensorsFile good = good_file();
  const std::string header = good.header().dump();
  const auto with_header = [&](const std::string& text) {
    return complaint(file, SafeTensorsFile::join(text, good.data()));
  };
  CHECK(contains(with_header("[]"), "object"));
  CHECK(contains(with_header(""), "JSON"));
  CHECK(contains(with_header(header.substr(0, header.size() - 1)), "JSON"));
  CHECK(contains(with_header("{\"a\xff\": 1}"), "JSON"));
  CHECK(contains(with_header(header + "x"), "JSON"));
  CHECK(contains(with_header(std::string(100000, '[')), "nests"));

  // What parsers of JSON forgive: a zero byte as the end of the text, and what stands in front.
  const std::string zero(1, '\0');
  for (const std::string& rest : {zero, zero + header, zero + "x", "  " + zero, zero + "\xff"}) {
    CHECK(contains(with_header(header + rest), "is zero"));
    CHECK(contains(with_header(header + rest),
                   "byte " + std::to_string(header.size() + rest.find('\0') + 1)));
  }
  CHECK(contains(with_header(zero), "is zero"));
  CHECK(contains(with_header(zero + header), "is zero"));
  CHECK(contains(with_header("{\"a" + zero + "\":" + header.substr(header.find(':') + 1)),
                 "is zero"));
  CHECK(contains(with_header("\xef\xbb\xbf" + header), "byte order mark"));
  CHECK(contains(with_header("\xef\xbb\xbf"), "byte order mark"));
  for (const char* front : {"\xef\xbb", "\xff\xfe", "\xfe\xff", "//\n", "/**/", ","}) {
    CHECK(contains(with_header(front + header), "JSON"));
  }
  for (const char* front : {" ", "\n", "\t "}) {
    CHECK(contains(with_header(front + header), "white space"));
  }
  for (const char* behind : {",", "{}", "//", "\xef\xbb\xbf", "\f"}) {
    CHECK(contains(with_header(header + behind), "JSON"));
  }
  // Space behind the header is the format's own padding.
  CHECK(with_header(header + " ").empty());
  CHECK(with_header(header + std::string(63, ' ')).empty());

  // A key twice: a tensor, a member of a tensor, a metadata word.
  const std::string copy = "\"layers.3.key\":" + good.header()["layers.3.key"].dump();
  CHECK(contains(with_header("{" + copy + "," + header.substr(1)), "'layers.3.key' twice"));
  CHECK(contains(with_header("{\"x\":{\"dtype\":\"U8\",\"dtype\":\"U8\"}," + header.substr(1)),
                 "'dtype' twice"));
  CHECK(
      contains(with_header("{\"x\":{\"\\u0064type\":\"U8\",\"dtype\":\"U8\"}," + header.substr(1)),
               "'dtype' twice"));
  // The same key in two objects is fine.
  CHECK(with_header(header).empty());

  // Lengths that the file does not have.
  std::string bytes = good.bytes();
  for (const std::uint64_t length : {std::uint64_t{bytes.size() - 7}, std::uint64_t{1} << 32,
                                     ~std::uint64_t{0}, std::uint64_t{1} << 63}) {
    for (unsigned i = 0; i < 8; ++i) bytes[i] = static_cast<char>(length >> (8 * i) & 0xffu);
    const std::string message = complaint(file, bytes);
    CHECK(contains(message, std::to_string(length)));
    CHECK(contains(message, std::to_string(bytes.size() - 8)));
  }
}

TEST_CASE("what is not a file is refused", "[recorded_cache]") {
  CHECK_THROWS_AS(RecordedCache::load("/nonexistent/file.safetensors"), FormatError);
  CHECK_THROWS_AS(RecordedCache::load("/"), FormatError);
  CHECK_THROWS_AS(RecordedCache::load(""), FormatError);
  CHECK_THROWS_AS(RecordedCache::load("/dev/zero"), FormatError);
}

TEST_CASE("a truncated file is refused at every byte", "[recorded_cache]") {
  const TemporaryFile file("verkv-recorded");
  const std::string bytes = good_file().bytes();
  std::size_t accepted = 0;
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    if (complaint(file, bytes.substr(0, length)).empty()) ++accepted;
  }
  CHECK(accepted == 0);
}

TEST_CASE("random damage of the header is either refused or harmless", "[recorded_cache]") {
  const TemporaryFile file("verkv-recorded");
  const std::string good = good_file().bytes();
  const std::size_t header_end = 8 + good_file().header().dump().size();
  std::mt19937 random(20240117);
  int refused = 0;
  for (int trial = 0; trial < 600; ++trial) {
    std::string bytes = good;
    const int flips = 1 + trial % 3;
    for (int i = 0; i < flips; ++i) {
      char& byte = bytes[random() % header_end];
      byte = trial % 2 == 0 ? static_cast<char>(byte ^ static_cast<char>(1u << (random() % 8)))
                            : static_cast<char>(random() % 256);
    }
    file.write(bytes);
    try {
      const RecordedCache cache = RecordedCache::load(file.path());
      // Whatever loaded is readable to the last element.
      float sum = 0;
      for (const RecordedLayer& layer : cache.layers()) {
        sum += element(layer.key, layer.key.tokens - 1, layer.kv_heads - 1, layer.key_dim - 1);
        sum += element(layer.new_value, cache.steps() - 1, layer.kv_heads - 1, layer.value_dim - 1);
      }
      CHECK(sum == sum);
    } catch (const FormatError&) {
      ++refused;
    }
  }
  CHECK(refused > 300);
}
