// The word lists and patterns of the generated texts: the files of data/, compiled into the
// program.
#ifndef VERKV_BENCH_TEXT_QUALITY_WORD_LISTS_HPP
#define VERKV_BENCH_TEXT_QUALITY_WORD_LISTS_HPP

#include <map>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace verkv::lab {

// The bytes of data/NAME.txt, made by parts.cmake. They live as long as the program.
extern const std::string_view kProseData;
extern const std::string_view kCodeData;
extern const std::string_view kPythonData;
extern const std::string_view kCppData;
extern const std::string_view kWordsData;

using Words = std::span<const std::string_view>;

// A heading "=== HEADING" and the lines below it, up to the next heading.
struct Section {
  std::string_view heading;
  std::string_view body;
};

// The sections of a file in order; what stands above the first heading is for the reader.
std::vector<Section> sections(std::string_view file);

// "a | b | c" without the spaces around the bars; "a |" has an empty last field.
std::vector<std::string_view> fields(std::string_view line);

// The lists of a file, by heading: an entry is a line that is not empty.
class WordLists {
 public:
  // `file` must outlive the lists.
  explicit WordLists(std::string_view file);

  // Throws InvalidArgument with the name where there is no such list.
  Words operator[](std::string_view name) const;
  bool has(std::string_view name) const { return lists_.count(name) > 0; }

 private:
  std::map<std::string_view, std::vector<std::string_view>> lists_;
};

// Of words.txt, which several generators share.
const WordLists& shared_words();

}  // namespace verkv::lab

#endif  // VERKV_BENCH_TEXT_QUALITY_WORD_LISTS_HPP
