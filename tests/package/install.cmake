# Installs the build tree into a prefix and moves that prefix. Whatever is installed must not name the
# folders it came from.
file(REMOVE_RECURSE ${work})
foreach(component IN LISTS components)
  execute_process(COMMAND ${CMAKE_COMMAND} --install ${build} --config ${config} --prefix ${work}/staged --component ${component}
                  COMMAND_ERROR_IS_FATAL ANY OUTPUT_QUIET)
endforeach()
file(RENAME ${work}/staged ${work}/moved)

file(GLOB_RECURSE texts ${work}/moved/*.cmake ${work}/moved/*.pc ${work}/moved/*.hpp ${work}/moved/*.h)
list(LENGTH texts count)
if(count LESS 8)
  message(FATAL_ERROR "Only ${count} text files were installed: ${texts}")
endif()
foreach(text IN LISTS texts)
  file(READ ${text} content)
  foreach(folder IN ITEMS ${build} ${source} ${work})
    string(FIND "${content}" "${folder}" at)
    if(NOT at EQUAL -1)
      message(SEND_ERROR "${text} names ${folder}")
    endif()
  endforeach()
endforeach()
