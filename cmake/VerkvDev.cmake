# verkv_dev: what every translation unit of this project is compiled with. It is linked privately
# and never exported, so a consumer inherits none of it.
add_library(verkv_dev INTERFACE)

# Results must not depend on the instruction set, so the compiler may not fuse a product and a sum
# on its own; where a fused operation is wanted the code says so.
target_compile_options(verkv_dev INTERFACE -ffp-contract=off)

# Inside another project the warnings would be noise that its authors cannot act on.
if(PROJECT_IS_TOP_LEVEL)
  target_compile_options(
    verkv_dev INTERFACE -Wall -Wextra -Wpedantic -Wconversion -Wsign-conversion -Wshadow
                        -Wnon-virtual-dtor -Woverloaded-virtual)
endif()
