# cmake -DBUILD=... -DSOURCE=... -DGENERATOR=... -P run.cmake: installs BUILD into a fresh prefix and
# builds and runs, from outside the tree, the examples and README.md's C and C++ blocks.
set(work ${BUILD}/install_test)
file(REMOVE_RECURSE ${work})
file(MAKE_DIRECTORY ${work})

function(run)
  execute_process(COMMAND ${ARGN} RESULT_VARIABLE result)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "failed: ${ARGN}")
  endif()
endfunction()

run(${CMAKE_COMMAND} --install ${BUILD} --prefix ${work}/prefix --component bittern)
run(${PYTHON} ${SOURCE}/tools/extract_readme.py ${SOURCE}/README.md ${work}/readme)
# Once as a project of both languages, once of C alone.
foreach(languages CXX,C C)
  if(languages STREQUAL C AND CXX_FLAGS MATCHES "-fsanitize")
    continue()  # a sanitizer's C++ part comes with the C++ linker
  endif()
  string(MAKE_C_IDENTIFIER "build_${languages}" build)
  run(${CMAKE_COMMAND} -S ${SOURCE}/tests/install -B ${work}/${build} -G ${GENERATOR}
    "-DCMAKE_PREFIX_PATH=${work}/prefix" -DEXAMPLES=${SOURCE}/examples -DREADME=${work}/readme
    "-DLANGUAGES=${languages}" -DCMAKE_BUILD_TYPE=Release -DCMAKE_CXX_COMPILER=${CXX}
    -DCMAKE_C_COMPILER=${CC} "-DCMAKE_CXX_FLAGS=${CXX_FLAGS}" "-DCMAKE_EXE_LINKER_FLAGS=${CXX_FLAGS}")
  run(${CMAKE_COMMAND} --build ${work}/${build})
  run(${CMAKE_CTEST_COMMAND} --test-dir ${work}/${build} --output-on-failure)
endforeach()
