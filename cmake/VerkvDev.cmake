# verkv_dev: what every translation unit of this project is compiled with. It is linked privately
# and never exported, so a consumer inherits none of it.
add_library(verkv_dev INTERFACE)

# Results must not depend on the instruction set, so the compiler may not fuse a product and a sum
# on its own; where a fused operation is wanted the code says so.
target_compile_options(verkv_dev INTERFACE -ffp-contract=off)

# verkv_quick: besides, for what waits for people or files and not for the processor. Its compile time is
# mostly the templates of others (options, JSON, text), of which -O1 makes less code.
add_library(verkv_quick INTERFACE)
target_link_libraries(verkv_quick INTERFACE verkv_dev)
target_compile_options(verkv_quick INTERFACE $<$<CONFIG:Release>:-O1>)

# Inside another project the warnings would be noise that its authors cannot act on.
if(PROJECT_IS_TOP_LEVEL)
  target_compile_options(
    verkv_dev INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow
                        $<$<COMPILE_LANGUAGE:CXX>:-Wnon-virtual-dtor -Woverloaded-virtual>)
endif()
