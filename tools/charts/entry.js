// What the pages of `inspect --html` and `verify --html` use of Apache ECharts.
import * as echarts from "echarts/core";
import { HeatmapChart, TreemapChart } from "echarts/charts";
import { GridComponent, TooltipComponent, VisualMapComponent } from "echarts/components";
import { SVGRenderer } from "echarts/renderers";

echarts.use([HeatmapChart, TreemapChart, GridComponent, TooltipComponent, VisualMapComponent, SVGRenderer]);
globalThis.echarts = echarts;
