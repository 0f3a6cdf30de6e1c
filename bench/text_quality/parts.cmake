# verkv_lab_parts: what the laboratory does without an engine. Built by its own project for the program
# and by the library's own build for the tests. Needs the targets verkv::verkv, fmt::fmt and
# nlohmann_json::nlohmann_json.
add_library(
  verkv_lab_parts OBJECT
  ${CMAKE_CURRENT_LIST_DIR}/code_text.cpp
  ${CMAKE_CURRENT_LIST_DIR}/eval_report.cpp
  ${CMAKE_CURRENT_LIST_DIR}/few_bits.cpp
  ${CMAKE_CURRENT_LIST_DIR}/prose.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tasks.cpp
  ${CMAKE_CURRENT_LIST_DIR}/text_random.cpp
  ${CMAKE_CURRENT_LIST_DIR}/texts.cpp
  ${CMAKE_CURRENT_LIST_DIR}/word_lists.cpp)
# The word lists become string literals of the program: no path has to be found at run time.
foreach(name IN ITEMS Prose Code Python Cpp Words)
  string(TOLOWER ${name} file)
  set(file ${CMAKE_CURRENT_LIST_DIR}/data/${file}.txt)
  file(READ ${file} text)
  configure_file(${CMAKE_CURRENT_LIST_DIR}/data.cpp.in ${CMAKE_CURRENT_BINARY_DIR}/${name}Data.cpp @ONLY)
  target_sources(verkv_lab_parts PRIVATE ${CMAKE_CURRENT_BINARY_DIR}/${name}Data.cpp)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${file})
endforeach()
set_target_properties(verkv_lab_parts PROPERTIES CXX_EXTENSIONS OFF UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0)
target_include_directories(verkv_lab_parts PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_link_libraries(
  verkv_lab_parts
  PUBLIC verkv::verkv
  PRIVATE fmt::fmt nlohmann_json::nlohmann_json)
