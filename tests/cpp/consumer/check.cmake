# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: The xpuruntime developers
#
# Installs the package of BUILD into WORK, and builds and runs SOURCE with nothing else.
function(run)
  execute_process(COMMAND ${ARGN} COMMAND_ERROR_IS_FATAL ANY)
endfunction()

file(REMOVE_RECURSE ${WORK})
run(${CMAKE_COMMAND} --install ${BUILD} --component cpp --prefix ${WORK}/prefix)
file(GLOB headers RELATIVE ${WORK}/prefix/include ${WORK}/prefix/include/xpuruntime/*.h)
list(LENGTH headers count)
if(count LESS 30)
  message(FATAL_ERROR "only ${count} headers are installed")
endif()
list(TRANSFORM headers REPLACE "(.+)" "#include <\\1>\n")
list(JOIN headers "" text)
file(WRITE ${WORK}/generated/all_headers.h "${text}")
run(${CMAKE_COMMAND} -S ${SOURCE} -B ${WORK}/build -G ${GENERATOR} -DCMAKE_CXX_COMPILER=${COMPILER}
  -DCMAKE_BUILD_TYPE=Release -DCMAKE_PREFIX_PATH=${WORK}/prefix -DCMAKE_CXX_FLAGS=-I${WORK}/generated)
run(${CMAKE_COMMAND} --build ${WORK}/build)
run(${WORK}/build/consumer)
