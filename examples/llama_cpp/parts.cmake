# verkv_llama_parts: what verkv_llama does without an engine. Built here for the program, and by the
# library's own build for its tests. Needs the targets verkv::verkv, fmt::fmt-header-only and
# nlohmann_json::nlohmann_json.
add_library(
  verkv_llama_parts OBJECT
  ${CMAKE_CURRENT_LIST_DIR}/chart.cpp
  ${CMAKE_CURRENT_LIST_DIR}/eval_report.cpp
  ${CMAKE_CURRENT_LIST_DIR}/tasks.cpp
  ${CMAKE_CURRENT_LIST_DIR}/texts.cpp)
set_target_properties(verkv_llama_parts PROPERTIES CXX_EXTENSIONS OFF)
target_include_directories(verkv_llama_parts PUBLIC ${CMAKE_CURRENT_LIST_DIR})
target_link_libraries(
  verkv_llama_parts
  PUBLIC verkv::verkv
  PRIVATE fmt::fmt-header-only nlohmann_json::nlohmann_json)
